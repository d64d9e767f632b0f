"""Models as a single graph: compiled and exported, with masks and positions."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, Trainer, TrainingArguments

from osdn import OSDNConfig, OSDNForCausalLM
from tests.models.variants import make, tokens

MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 0, 1, 2], [*range(9)]])


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    counters.clear()


@torch.no_grad()
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"attention_mask": MASK, "position_ids": POSITIONS},
        pytest.param({"attention_mask": MASK}, marks=pytest.mark.slow),
        pytest.param({"position_ids": POSITIONS}, marks=pytest.mark.slow),
        pytest.param({"seq_idx": (POSITIONS == 0).cumsum(1)}, marks=pytest.mark.slow),
        {"attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0), "use_cache": True},
    ],
    ids=lambda how: "+".join(how) or "ids",
)
def test_the_whole_model_is_one_graph_for_every_layout_of_the_batch(how):
    model, ids = make("osgdn-apf", num_hidden_layers=1), tokens(3, 9)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected, outputs = model(ids, **how), compiled(ids, **how)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-4)
    if outputs.past_key_values is not None:
        following = tokens(3, 1, seed=2)
        mask = torch.nn.functional.pad(MASK, (0, 1), value=1) if "attention_mask" in how else None
        torch.testing.assert_close(
            compiled(following, past_key_values=outputs.past_key_values, attention_mask=mask).logits,
            model(following, past_key_values=expected.past_key_values, attention_mask=mask).logits,
            rtol=1e-4,
            atol=1e-4,
        )


@torch.no_grad()
def test_what_tracing_cannot_check_is_asserted_at_run_time():
    model, ids = make("osdn", num_hidden_layers=1), tokens(3, 9)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="a packed row cannot be cached"):
        compiled(ids, position_ids=POSITIONS, use_cache=True)
    with pytest.raises(RuntimeError, match="a compiled step of one token"):
        compiled(ids[:, :1], attention_mask=MASK[:, :1])


@torch.no_grad()
def test_an_exported_model_accepts_a_mask():
    model, ids = make("osdn-apf", num_hidden_layers=1), tokens(3, 9)
    length = {1: torch.export.Dim("length", min=8, max=1000)}
    inputs = {"input_ids": ids, "attention_mask": MASK, "use_cache": False}
    shapes = {"input_ids": length, "attention_mask": length, "use_cache": None}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    longer = tokens(3, 40), (torch.arange(40) >= torch.tensor([[0], [11], [39]])).long()
    for x, mask in [(ids, MASK), longer]:
        logits = program(input_ids=x, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits, model(x, attention_mask=mask).logits, rtol=1e-4, atol=1e-4)


def test_generation_with_a_static_cache_compiles_the_decoding_step():
    model, ids = make("oskda", num_hidden_layers=1), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    compile_config = CompileConfig(backend="eager", mode=None)
    compile_config._compile_all_devices = True
    how = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    expected = model.generate(ids, **how)
    got = model.generate(ids, cache_implementation="static", compile_config=compile_config, **how)
    assert torch.equal(got, expected)
    assert 0 < counters["frames"]["ok"] < 5


def test_the_trainer_compiles_a_padded_batch_as_one_frame(tmp_path):
    torch.manual_seed(0)
    model = OSDNForCausalLM(OSDNConfig.from_preset("osdn-apf-tiny", vocab_size=61))
    ids = tokens(12).tolist()
    data = [
        {"input_ids": ids[:n] + [0] * (12 - n), "attention_mask": [1] * n + [0] * (12 - n)} for n in (12, 7)
    ]
    data = [row | {"labels": row["input_ids"]} for row in data]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, torch_compile=True, torch_compile_backend="eager",
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data).train()
    assert counters["frames"]["ok"] <= 2
    assert not counters["graph_break"]
