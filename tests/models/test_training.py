"""Losses, gradients and training, as with any model of `transformers`."""

import copy
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.models import loss as losses
from tests.models.variants import VARIANTS, make, tokens


def plain_loss(model, ids, labels):
    logits = model(ids).logits[:, :-1].flatten(0, 1).double()
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


def gradients(loss, model):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_and_its_gradients_match_the_cross_entropy(rows, tied, monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 61 * rows)
    model, ids = make("osdn-apf", tie_word_embeddings=tied), tokens(3, 9)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.manual_seed(0)) < 0.3, -100)
    expected = plain_loss(model, ids, labels)
    outputs = model(ids, labels=labels)
    torch.testing.assert_close(outputs.loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(outputs.logits, model(ids).logits)
    theirs = gradients(expected, model)
    for name, grad in gradients(model(ids, labels=labels).loss, model).items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_in_half_precision_matches_float64(rows, dtype, monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 61 * rows)
    x, weight = (torch.randn(n, 30, generator=torch.manual_seed(n)).to(dtype) for n in (27, 61))
    labels = tokens(1, 27)[0].masked_fill(torch.arange(27) % 4 == 0, -100)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum", ignore_index=-100)
    inputs = [tensor.requires_grad_() for tensor in (x, weight)]
    loss = losses.summed_cross_entropy(*inputs, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-3, atol=0)
    assert losses.summed_cross_entropy(x.detach(), weight.detach(), labels) == loss
    for scale in (1.0, 1 / 27):  # twice: the graph can be retained
        theirs = torch.autograd.grad(expected * scale, exact, retain_graph=True)
        for mine, want in zip(torch.autograd.grad(loss * scale, inputs, retain_graph=True), theirs):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.double(), want, rtol=0.02, atol=0.01 * want.abs().max().item())


@pytest.mark.parametrize("shape", [(2, 16), (4, 8), (4, 4), (2, 7), (16,)])
def test_labels_of_another_shape_are_rejected(shape):
    model, ids = make("osdn"), tokens(2, 8)
    for name in ("labels", "shift_labels"):
        with pytest.raises(
            ValueError, match=rf"{name} has shape .*must have the shape of the tokens, \[2, 8\]"
        ):
            model(ids, **{name: tokens(*shape)})


def test_labels_can_have_any_integer_dtype():
    model, ids = make("osdn"), tokens(2, 8)
    assert model(ids, labels=ids.int()).loss == model(ids, labels=ids).loss
    with pytest.raises(ValueError, match=r"labels has dtype torch.float32; it must be an integer dtype"):
        model(ids, labels=ids.float())


def test_the_trainer_smooths_shifted_labels(tmp_path):
    model, ids = make("osdn"), tokens(2, 8)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    loss = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    want = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, want)


def test_the_loss_of_a_head_that_is_more_than_its_weight_matches_its_logits():
    ids = tokens(2, 8)
    biased, hooked, pruned = (make("osdn") for _ in range(3))
    biased.set_output_embeddings(nn.Linear(30, 61))
    hooked.lm_head.register_forward_hook(lambda module, inputs, output: output / 10)
    prune.l1_unstructured(pruned.lm_head, "weight", 0.3)
    for model in (biased, hooked, pruned):
        for _ in range(2):
            loss = model.train()(ids, labels=ids).loss
            loss.backward()
        torch.testing.assert_close(loss.double(), plain_loss(model.eval(), ids, ids), rtol=1e-5, atol=0)


def test_the_loss_is_divided_by_the_number_of_items_the_trainer_counted():
    model, ids = make("osdn"), tokens(2, 7)
    mean = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=24).loss, mean / 2)
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=torch.tensor(24)).loss, mean / 2)
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, mean)


def test_logits_are_returned_if_requested():
    model, ids = make("osdn"), tokens(2, 7)
    logits = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    assert torch.equal(model(ids, num_logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])
    assert model(ids, labels=ids, skip_logits=True).logits is None
    model.train()
    assert model(ids, labels=ids).logits is None
    assert model(ids, labels=ids, skip_logits=False).logits is not None
    assert model(ids).logits is not None
    assert model(ids).past_key_values is None  # nothing is cached in training unless requested


def test_hidden_states_are_the_activations_between_blocks():
    model, ids = make("kda"), tokens(2, 7)
    outputs = model(ids, output_hidden_states=True, use_cache=False)
    first, second, last = outputs.hidden_states
    assert torch.equal(first, model.model.embeddings(ids))
    assert torch.equal(second, model.model.layers[0](first))
    assert torch.equal(last, model.model.norm(model.model.layers[1](second)))
    assert torch.equal(outputs.logits, model.lm_head(last))
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3
    assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])},
        {"seq_idx": torch.tensor([[0, 0, 1, 1]])},
    ],
)
def test_hidden_states_are_on_the_path_of_the_gradient(how):
    """Against a finite difference of the computation from that layer on."""
    model, ids = make("osdn").double(), tokens(2, 4)
    outputs = model(ids, output_hidden_states=True, use_cache=False, **how)
    for i, state in enumerate(outputs.hidden_states):
        (grad,) = torch.autograd.grad(outputs.logits.sum(), state, retain_graph=True)
        assert grad.shape == state.shape
        assert grad.abs().sum() > 0, i
    (grad,) = torch.autograd.grad(outputs.logits.sum(), outputs.hidden_states[0])
    direction = torch.randn(grad.shape, generator=torch.manual_seed(0), dtype=grad.dtype)
    shifted = [
        model(
            inputs_embeds=outputs.hidden_states[0].detach() + e * direction, use_cache=False, **how
        ).logits.sum()
        for e in (1e-6, -1e-6)
    ]
    torch.testing.assert_close(
        (shifted[0] - shifted[1]) / 2e-6, (grad * direction).sum(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_in_half_precision_is_a_float32_mean(dtype):
    model, ids = make("osgdn-apf").to(dtype), tokens(4, 512)
    loss = model(ids, labels=ids).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), plain_loss(model, ids, ids), rtol=1e-4, atol=0)
    loss.backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


LONG_ROW = """
import resource, torch
from osdn import OSDNConfig, OSDNForCausalLM
config = OSDNConfig(hidden_size=64, num_heads=2, num_hidden_layers=1, intermediate_size=64)
model, ids = OSDNForCausalLM(config).train(), torch.randint(0, 32_000, (1, 65_536))
model(ids[:, :64], labels=ids[:, :64]).loss.backward()  # do not count what compiling and importing take
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model(ids, labels=ids, cu_seqlens=torch.arange(0, 65_537, 4096)).loss.backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_row_of_65536_tokens_never_holds_its_logits():
    run = subprocess.run([sys.executable, "-c", LONG_ROW], capture_output=True, text=True, check=True)
    grown = int(run.stdout) * 1024
    assert grown < 65_536 * 32_000 * 4 / 4  # less than a quarter of 8 GiB of logits


def test_autocast_computes_the_head_in_half_precision_and_keeps_float32_weights():
    model, ids = make("osdn-apf"), tokens(2, 33)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    assert not torch.equal(loss, exact)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(variant, reentrant):
    model, ids = make(variant).train(), tokens(1, 12)
    cuts = torch.tensor([0, 5, 12])
    expected = gradients(model(ids, labels=ids, cu_seqlens=cuts).loss, model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(ids, labels=ids, cu_seqlens=cuts).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["osdn-apf", "osgdn-apf", "kda"])
def test_a_compiled_model_gives_the_same_loss_and_gradients(variant):
    model, ids = make(variant, num_hidden_layers=1).train(), tokens(2, 12)
    expected = model(ids, labels=ids).loss
    theirs = gradients(expected, model)
    loss = torch.compile(model, fullgraph=True)(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, grad in gradients(loss, model).items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("variant", ["osdn-apf", "osgdn-apf", "oskda"])
def test_gradients_of_single_samples_by_function_transforms(variant):
    model, ids = make(variant).double(), tokens(3, 10)
    weights = dict(model.named_parameters())

    def loss(weights, row):
        labels = {"labels": row[None], "use_cache": False}
        return torch.func.functional_call(model, weights, (row[None],), labels).loss

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, ids)
    for i, row in enumerate(ids):
        for name, want in gradients(model(row[None], labels=row[None]).loss, model).items():
            torch.testing.assert_close(each[name][i], want, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("variant", ["osdn-apf", "osgdn-apf", "kda"])
def test_an_exported_model_gives_the_same_logits_at_other_lengths(variant):
    model = make(variant, num_hidden_layers=1)
    length = {1: torch.export.Dim("length", min=8, max=1000)}
    with torch.no_grad():
        program = torch.export.export(
            model, (tokens(2, 70),), {"use_cache": False}, dynamic_shapes=(length, None)
        )
        for ids in (tokens(2, 70), tokens(2, 9), tokens(2, 200)):
            torch.testing.assert_close(program.module()(ids, use_cache=False).logits, model(ids).logits)


def test_lora_trains_only_the_adapters():
    model, ids = make("osdn-apf"), tokens(4, 16)
    before = copy.deepcopy(model.state_dict())
    targets = ["q_proj", "v_proj", "o_proj", "retention", "lm_head"]
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    torch.testing.assert_close(
        lora(ids, labels=ids).loss.double(), plain_loss(lora, ids, ids), rtol=1e-5, atol=0
    )
    optimizer = torch.optim.AdamW(lora.parameters(), lr=0.05)
    losses = []
    for _ in range(10):
        loss = lora(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    # The adapted head affects the loss, although the loss normally bypasses the logits.
    torch.testing.assert_close(
        lora(ids, labels=ids).loss.double(), plain_loss(lora, ids, ids), rtol=1e-5, atol=0
    )
    merged = lora.merge_and_unload().state_dict()
    changed = {name for name, value in merged.items() if not torch.equal(value, before[name])}
    assert {name.split(".")[-2] for name in changed} == set(targets)


def test_a_resized_vocabulary_still_has_a_loss():
    model, ids = make("osdn"), tokens(2, 9)
    model.resize_token_embeddings(70)
    assert model.lm_head.weight.shape[0] == model.config.vocab_size == 70
    torch.testing.assert_close(
        model(ids, labels=ids).loss.double(), plain_loss(model, ids, ids), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("collator", [None, DataCollatorWithFlattening()])
def test_the_trainer_of_transformers_trains_for_ten_steps(tmp_path, collator):
    torch.manual_seed(0)
    model = OSDNForCausalLM(OSDNConfig.from_preset("osdn-apf-tiny", vocab_size=61))
    ids = tokens(12).tolist()
    lengths = [12] * 8 if collator is None else [12, 5, 9, 12] * 2
    data = [{"input_ids": ids[:n], "labels": ids[:n]} for n in lengths]
    arguments = TrainingArguments(
        tmp_path, max_steps=10, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=3e-3, logging_steps=1, report_to=[], use_cpu=True, gradient_checkpointing=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert losses[0] == pytest.approx(before, rel=0.02)
    assert trainer.evaluate()["eval_loss"] < losses[0] - 0.5


def test_initial_values_match_those_of_the_layers():
    torch.manual_seed(0)
    model = OSDNForCausalLM(
        OSDNConfig.from_preset(
            "oskda-apf-tiny", preconditioner={"retention": "learned", "initial_scale": "free"}
        )
    )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Embedding)) and "retention" not in name:
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.15), name
    for layer in model.model.layers:
        preconditioner = layer.attn.preconditioner
        assert torch.equal(preconditioner.retention.weight, torch.zeros(2, 64))
        torch.testing.assert_close(preconditioner.retention.bias.sigmoid(), torch.full((2,), 0.999))
        assert torch.equal(preconditioner.initial_scale(), torch.ones(2, 32))
        assert 1 <= layer.attn.A_log.exp().min() <= layer.attn.A_log.exp().max() <= 16.001
        assert 0.000999 < F.softplus(layer.attn.dt_bias).min() < F.softplus(layer.attn.dt_bias).max() < 0.1001
        assert torch.equal(layer.attn.o_norm.weight, torch.ones(32))
        assert torch.equal(layer.attn.g_proj[1].bias, torch.zeros(64))


def test_the_write_gate_starts_at_its_configured_bias():
    shape = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 1, "vocab_size": 50}
    plain = OSDNForCausalLM(OSDNConfig(**shape)).model.layers[0].attn
    biased = OSDNForCausalLM(OSDNConfig(beta_bias=-2, **shape)).model.layers[0].attn
    assert plain.b_proj.bias is None
    assert torch.equal(biased.b_proj.bias, torch.full((2,), -2.0))
    pgdn = OSDNForCausalLM(OSDNConfig(preconditioner={"rule": "pgdn", "center": 0.5}, **shape))
    own = pgdn.model.layers[0].attn.preconditioner
    assert torch.equal(own.center, torch.full((2,), 0.5))
    assert own.A_log.exp().max() <= 16
    assert ((own.dt_bias.exp() + 1).log() <= 0.101).all()  # the initial time steps
