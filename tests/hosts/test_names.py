"""Which functions the names refer to before, during and after acceleration."""

import subprocess
import sys
import threading

import pytest
import torch

import osdn
from osdn.analysis.capture import capture
from osdn.hosts.names import FAMILIES, FORWARDS, REPLACEMENTS
from tests.hosts.families import make, module, tokens


def names():
    found = {
        (family, name): getattr(module(family), name, None) for family in FAMILIES for name in REPLACEMENTS
    }
    return found | {
        (family, name): x.forward
        for family in FAMILIES
        for name, x in vars(module(family)).items()
        if name.endswith(tuple(FORWARDS))
    }


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_undo_restores_every_name():
    before = names()
    assert osdn.accelerate() == list(FAMILIES)
    during = names()
    assert all(during[key] is not before[key] for key in before if before[key] is not None)
    assert osdn.accelerate() == list(FAMILIES)
    assert names() == during  # a second call changes nothing
    assert osdn.accelerate(undo=True) == list(FAMILIES)
    assert names() == before
    assert osdn.accelerate(undo=True) == []


def test_families_call_only_functions_that_we_know():
    for family in FAMILIES:
        known = {name for name in REPLACEMENTS if hasattr(module(family), name)}
        assert len(known) == 6, (family, known)
        classes = [name for name in vars(module(family)) if name.endswith(tuple(FORWARDS))]
        decays = family in ("kimi_linear", "bailing_hybrid", "glm5_next")  # computed by a separate module
        assert len(classes) == (2 if decays else 1), (family, classes)


def test_no_family_is_imported_and_later_imports_are_accelerated():
    run(
        "import sys, osdn\n"
        "assert osdn.accelerate() == []\n"
        "assert not any('qwen3_next.modeling' in name for name in sys.modules)\n"
        "from transformers import Qwen3NextForCausalLM, OlmoHybridForCausalLM\n"
        "assert osdn.accelerate() == ['qwen3_next', 'olmo_hybrid']\n"
        "module = sys.modules[Qwen3NextForCausalLM.__module__]\n"
        "assert '/hosts/' in module.torch_chunk_gated_delta_rule.__code__.co_filename\n"
        "assert osdn.accelerate(undo=True) == ['qwen3_next', 'olmo_hybrid']\n"
        "from transformers import KimiLinearForCausalLM\n"
        "assert osdn.accelerate(undo=True) == []\n"
    )


def test_other_devices_use_the_original(monkeypatch):
    asked, theirs = [], module("qwen3_next")

    def original(*_, **settings):
        asked.append(settings)
        return "the original"

    monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", original)
    osdn.accelerate()
    q = torch.empty(1, 3, 2, 4, device="meta")
    settings = {"g": q[..., 0], "beta": q[..., 0], "cu_seqlens": torch.tensor([0, 3])}
    assert theirs.torch_chunk_gated_delta_rule(q, q, q, **settings) == "the original"
    assert asked == [settings]
    osdn.accelerate(undo=True)  # before monkeypatch restores the name


def test_models_running_in_other_threads_stay_correct():
    model, ids = make("qwen3_5"), tokens(1, 12)
    original = module("qwen3_5").torch_chunk_gated_delta_rule
    with torch.no_grad():
        expected = model(ids).logits
        failed = []

        def use():
            with torch.no_grad():
                for _ in range(5):
                    if not torch.allclose(model(ids).logits, expected, rtol=1e-3, atol=1e-4):
                        failed.append(1)

        def switch():
            for i in range(50):
                osdn.accelerate(undo=bool(i % 2))

        threads = [threading.Thread(target=f) for f in (use, use, switch, switch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    osdn.accelerate(undo=True)
    assert module("qwen3_5").torch_chunk_gated_delta_rule is original


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_captures_see_the_same_calls(family):
    model, ids = make(family), tokens(1, 9)
    before = capture(model, input_ids=ids)
    osdn.accelerate()
    for ours, theirs in zip(capture(model, input_ids=ids), before, strict=True):
        torch.testing.assert_close(ours.problem.k, theirs.problem.k)
        torch.testing.assert_close(ours.output, theirs.output, rtol=1e-4, atol=1e-5)


def test_bad_arguments_are_rejected():
    with pytest.raises(TypeError, match="undo must be True or False, got 1"):
        osdn.accelerate(undo=1)
