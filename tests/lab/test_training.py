"""Matched initial weights, reproducible numbers, and write statistics against the recurrence itself."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from osdn.analysis.capture import capture
from osdn.lab.recall import RecallTask
from osdn.lab.residual import scales, write_statistics
from osdn.lab.training import (
    Learner,
    Run,
    build,
    cross_entropy,
    execute,
    train,
    train_in_budgets,
    warmup_cosine,
)
from osdn.lab.variants import ABLATIONS, Variant, baseline_of, sweep
from osdn.models.presets import VARIANTS
from osdn.zoo import RECURRENCES

TASK = RecallTask(vocab_size=24, pairs=3, length=21, passes=2, evaluation=7)


def small(name, seed=0, **settings):
    return Run(TASK, Variant(name), seed, **{"width": 16, "steps": 3, "batch": 2, **settings})


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [*VARIANTS, "osgdn-apf-hybrid", "oskda-hybrid", "osdn-newton-hybrid"])
def test_variants_of_a_backbone_start_from_the_same_weights(name):
    known = [*VARIANTS, "gdn-hybrid", "kda-hybrid", "delta_net-hybrid"]
    plain = baseline_of(Variant(name), [Variant(other) for other in known])
    assert Variant(name).hybrid == plain.hybrid
    mine, theirs = build(small(name, seed=5)).state_dict(), build(small(plain.name, seed=5)).state_dict()
    assert set(theirs) <= set(mine)
    assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    other = build(small(name, seed=6)).state_dict()
    assert not torch.equal(mine["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("delta_net+longhorn", ()),
        ("delta_net+product-2", ("k_proj", "v_proj", "b_proj", "k_conv1d", "v_conv1d")),
        ("gdn+comba", ("update",)),
        ("kda+gdn2", ("b_proj",)),
    ],
)
def test_other_updates_share_the_initial_weights_of_equal_shape(name, other):
    base = name.partition("+")[0]
    plain, mine = build(small(base)).state_dict(), build(small(name)).state_dict()
    different = {key for key in mine if key not in plain or not torch.equal(mine[key], plain[key])}
    assert {key.split(".attn.")[-1].split(".")[0] for key in different} == set(other)
    assert baseline_of(Variant(name), [Variant("osdn"), Variant("delta_net"), Variant(base)]) == Variant(base)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("delta_net+efla", {"beta", "key_scale", "decay", "q_geo"}),
        ("gdn+kaczmarz", {"beta", "key_scale", "decay", "q_geo"}),
        ("delta_net+product-2", {"beta", "key_scale", "decay", "q_geo"}),
        ("gdn+comba", {"beta", "decay"}),
        ("kda+gdn2", {"decay", "q_geo"}),
    ],
)
def test_other_updates_train_and_report_the_statistics_they_have(name, known):
    run = replace(small(name, budgets=(0.5, 1.0)), variant=Variant(name, beta_bias=-2.0, write_scale=2.0))
    found = execute(run)
    assert set(found["writes"][0]) == known
    assert known - {"q_geo"} <= set(found["budgets"][0])
    assert ("q_geo" in found) == ("q_geo" in known)
    assert all(0 < row[x] < 2 for row in found["writes"] for x in known)


def test_write_strengths_of_unnormalised_keys_are_converted_to_unit_keys():
    model = build(small("delta_net+kaczmarz")).eval()
    inputs, _ = TASK.sample(3, torch.Generator().manual_seed(1))
    mixer, gates = model.model.layers[0].attn, []
    mixer.k_proj.weight.data *= 100  # for such keys the step's epsilon of 1e-6 is negligible
    with mixer.b_proj.register_forward_hook(lambda _, args, z: gates.append(z.sigmoid().mean().item())):
        found = write_statistics(model, inputs)
    assert found["writes"][0]["beta"] == pytest.approx(gates[0], rel=1e-4)


@pytest.mark.parametrize("name", ["delta_net", "osgdn-apf", "osdn-apf+d0", "osdn-apf-hybrid+d0"])
def test_the_same_seed_gives_the_same_numbers(name):
    assert execute(small(name)) == execute(small(name))


def test_step_size_zero_trains_like_the_plain_model():
    plain = execute(small("delta_net"))
    still = execute(Run(TASK, Variant("osdn", eta=0.0), 0, width=16, steps=3, batch=2))
    losses = [[point["loss"] for point in result["curve"]] for result in (still, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert still["q_geo"] == pytest.approx(plain["q_geo"], rel=1e-4)


def test_training_lowers_the_loss_of_a_learnable_task():
    task = RecallTask(vocab_size=8, pairs=1, length=8, passes=1, evaluation=64)
    run = Run(task, Variant("osdn"), 0, width=32, steps=120, batch=32, learning_rate=1e-2)
    assert execute(run)["accuracy"] > 0.9


@pytest.mark.parametrize(
    "name", ["delta_net", "osdn", "oskda-apf", "osdn+beta-blind", "osdn+retention-0.999"]
)
def test_the_residual_ratio_matches_the_writes(name):
    model = build(Run(TASK, Variant(name), 0, width=16)).eval()
    inputs, _ = TASK.sample(3, torch.Generator().manual_seed(1))
    found = write_statistics(model, inputs)
    logs = []
    for layer in capture(model, input_ids=inputs):
        p = layer.problem
        d = torch.ones_like(p.k[:, 0]).double()  # the paper's two recurrences, token by token
        S = torch.zeros(*p.k.shape[:1], *p.k.shape[2:], p.v.shape[-1], dtype=torch.float64)
        for t in range(inputs.shape[1]):
            k, v, beta = p.k[:, t].double(), p.v[:, t].double(), p.beta[:, t, :, None].double()
            if p.log_decay is not None:
                S = S * p.log_decay[:, t].double().exp()[..., None]
            error = v - (S * k[..., None]).sum(-2)
            S = S + (d * k)[..., None] * (beta * error)[..., None, :]
            after = v - (S * k[..., None]).sum(-2)
            logs.append((after.square().sum(-1) / error.square().sum(-1)).log().mean().item())
            b = beta if p.beta_aware else torch.ones_like(beta)
            r = (
                p.retention
                if isinstance(p.retention, torch.Tensor)
                else torch.full_like(p.beta, p.retention or 1)
            )
            step = p.eta * b * (1 - b * (d * k * k).sum(-1, True)) / (k * k).sum(-1, True) * k * k
            d = (r[:, t, :, None] * d + step).clamp(*p.bounds)
    assert found["q_geo"] == pytest.approx(math.exp(sum(logs) / len(logs)), rel=1e-3)
    assert len(found["log_q"]) == TASK.length


def test_scales_of_a_prompt_start_at_one_and_move_by_eta():
    model = build(Run(TASK, Variant("osdn", eta=0.1), 0, width=16)).eval()
    found = scales(model, TASK.sample(1, torch.Generator().manual_seed(1))[0])
    assert found.shape == (2, TASK.length, 2, 8)
    assert torch.equal(found[:, 0], torch.ones_like(found[:, 0]))
    assert 0 < (found[:, 1:] - found[:, :-1]).abs().max() <= 0.1


def test_loss_gradient_and_accuracy_are_those_of_pytorch():
    logits = (10 * torch.randn(40, 7)).requires_grad_()
    answers = torch.randint(7, (40,))
    loss, grad, accuracy = cross_entropy(logits.detach(), answers)
    truth = F.cross_entropy(logits.double(), answers)
    truth.backward()
    assert loss == pytest.approx(truth.item(), rel=1e-6)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-5, atol=1e-8)
    assert accuracy == (logits.argmax(-1) == answers).double().mean().item()


@pytest.mark.parametrize(
    ("name", "scale"), [("osdn-newton", 0.5), ("oskda-newton+block-8", 0.5), ("gdn+pgdn", 1)]
)
def test_write_statistics_cover_every_rule(name, scale):
    # Newton's first write is k / (1 + beta |k|²): its scale is below one, and no write overshoots.
    model = build(Run(TASK, Variant(name, beta_bias=-3.0), 0, width=32)).eval()
    found = write_statistics(model, TASK.sample(3, torch.Generator().manual_seed(1))[0])
    assert found["beta"] == pytest.approx(1 / (1 + math.exp(3)), rel=0.1)
    assert scale < found["key_scale"] < 1.5
    assert found["q_geo"] == pytest.approx((1 - found["beta"] * found["key_scale"]) ** 2, rel=0.05)
    assert len(found["writes"]) == 2
    assert (found["decay"] < 1) == (name != "osdn-newton")


def test_a_write_scale_of_two_doubles_the_write_strength():
    inputs = TASK.sample(3, torch.Generator().manual_seed(1))[0]
    models = [build(Run(TASK, Variant("delta_net", write_scale=x), 0, width=16)).eval() for x in (1.0, 2.0)]
    single, double = (write_statistics(model, inputs)["writes"][0]["beta"] for model in models)
    assert double == pytest.approx(2 * single)


BUDGETS = (0.25, 0.5, 1.0)


def test_a_budget_gives_the_result_of_a_run_of_that_many_steps():
    whole = Run(TASK, Variant("osdn"), 0, width=16, steps=40, batch=2, budgets=BUDGETS)
    found = [(x.step, x.model.lm_head.weight.detach().clone()) for x in train_in_budgets(whole)]
    assert [step for step, _ in found] == [10, 20, 40]
    for (steps, weight), part in zip(found, (1, 2, 3)):  # the same warm-up, batches and decay
        short = replace(whole, steps=steps, budgets=tuple(b * 40 / steps for b in BUDGETS[:part]))
        *_, last = train_in_budgets(short)
        assert torch.equal(last.model.lm_head.weight, weight)


def test_the_rate_rises_stays_and_falls_to_zero_at_every_budget(monkeypatch):
    run = Run(TASK, Variant("osdn"), 0, width=16, steps=80, batch=2, budgets=BUDGETS)
    seen = []
    original = Learner.learn
    monkeypatch.setattr(
        Learner, "learn", lambda self, batch, rate: seen.append(rate) or original(self, batch, rate)
    )
    assert [x.step for x in train_in_budgets(run)] == [20, 40, 80]
    decays = [[1 - i / (n + 1) for i in range(1, n + 1)] for n in (4, 8, 16)]
    trunk = [0.5, *[1.0] * 63]  # the warm-up is a tenth of the first budget
    expected = trunk[:16] + decays[0] + trunk[16:32] + decays[1] + trunk[32:] + decays[2]
    assert seen == pytest.approx(expected)
    assert len(seen) == run.updates == 92


def test_step_i_sees_batch_i_in_the_trunk_and_in_every_branch(monkeypatch):
    run = Run(TASK, Variant("osdn"), 0, width=16, steps=20, batch=2, budgets=BUDGETS)
    batches = [batch for batch, _ in zip(TASK.batches(0, 2), range(20))]
    seen = []

    def look(self, batch, rate):
        seen.append(torch.equal(batch[0], batches[self.step][0]))
        self.step += 1

    monkeypatch.setattr(Learner, "learn", look)
    assert [x.step for x in train_in_budgets(run)] == [5, 10, 20]
    assert len(seen) == run.updates
    assert all(seen)


def test_a_result_with_budgets_repeats_the_numbers_of_the_last():
    run = Run(TASK, Variant("delta_net"), 0, width=16, steps=8, batch=2, budgets=BUDGETS)
    found = execute(run)
    assert [x["steps"] for x in found["budgets"]] == [2, 4, 8]
    assert found["accuracy"] == found["budgets"][-1]["accuracy"]
    assert len(json.dumps(found)) < 3000  # there are many such files


def test_sweeps_leave_the_plain_models_alone():
    found = sweep(["delta_net", "osdn"], [0.1, 1.0], [(0.5, 2.0), (0.25, 4.0)])
    assert [v.label for v in found] == [
        "delta_net",
        "osdn eta=0.1 box=0.5:2",
        "osdn eta=0.1 box=0.25:4",
        "osdn eta=1 box=0.5:2",
        "osdn eta=1 box=0.25:4",
    ]
    config = found[2].config(32, vocab_size=50)
    assert config.preconditioner["eta"] == 0.1
    assert tuple(config.preconditioner["bounds"]) == (0.25, 4.0)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_ablation_trains(ablation):
    _, curve = train(small(f"osdn+{ablation}", steps=1))
    assert math.isfinite(curve[-1]["loss"])


@pytest.mark.parametrize("name", RECURRENCES)
def test_every_row_of_the_zoo_trains(name):
    name = f"zoo:{name}" if name in VARIANTS else name
    model, curve = train(small(name, steps=1))
    assert {block.attn.mixer.recurrence.name for block in model.model.layers} == {name.removeprefix("zoo:")}
    assert math.isfinite(curve[-1]["loss"])
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["gla", "mesa_net", "zoo:osdn"])
def test_a_zoo_row_has_an_accuracy_but_no_residual_ratio(name):
    result = execute(small(name))
    assert result == execute(small(name))
    assert 0 <= result["accuracy"] <= 1
    assert "q_geo" not in result


@pytest.mark.parametrize(
    "name", ["osdm", "osdn+d1", "delta_net+d0", "gla+d0", "osdn+pgdn", "zoo:osdm", "zoo:osdn-apf+d0"]
)
def test_unknown_names_are_rejected(name):
    with pytest.raises(ValueError, match=r"there is no|does not scale"):
        Variant(name)


def test_the_learning_rate_rises_and_ends_near_zero():
    rates = [warmup_cosine(step, 100) for step in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[10] == 1
    assert rates[-1] < 0.001
