"""Settings: every config of the project is complete and is what the paper says; mistakes are told by name."""

from pathlib import Path

import pytest
import yaml

from osdn import PRESETS
from osdn.training.settings import load_settings

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_config_loads_and_writes_to_a_directory_of_its_own(path):
    settings = load_settings(path)
    assert settings.output_dir == f"runs/{path.parent.name}/{path.stem}"
    assert settings.accumulation(1) >= 1
    assert yaml.safe_load(settings.to_yaml()) == yaml.safe_load(path.read_text())  # no value is ours


def test_every_model_of_the_paper_has_a_config():
    models = {load_settings(path).model["preset"] for path in CONFIGS.rglob("*.yaml")}
    assert models == set(PRESETS)


@pytest.mark.parametrize("path", sorted((CONFIGS / "340m").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_340m_runs_are_those_of_the_paper(path):
    """Appendix "Training and Evaluation Reproduction Details"."""
    settings = load_settings(path)
    assert settings.model == {"preset": f"{path.stem}-340m"}
    assert (settings.data.source, settings.data.name) == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert settings.data.tokenizer == "fla-hub/delta_net-1.3B-100B"
    assert (settings.data.seq_len, settings.data.context_len) == (65_536, 4_096)
    assert settings.optimizer.learning_rate == 1e-3
    assert settings.optimizer.max_grad_norm == 1.0
    assert settings.training.seed == 42
    assert settings.training.precision == "bfloat16"
    assert (settings.accumulation(8), settings.accumulation(4)) == (1, 2)
    assert round(settings.training.steps * settings.training.tokens_per_step / 1e9, 2) == 10.74


def test_the_ablations_are_those_of_the_paper():
    found = {path.stem: load_settings(path).model_config() for path in (CONFIGS / "ablations").glob("*.yaml")}
    assert found["osdn-d0"].preconditioner["initial_scale"] == "projected"
    assert found["osdn-d0-free"].preconditioner["initial_scale"] == "free"
    assert found["osdn-beta-unaware"].preconditioner["beta_aware"] is False
    assert found["oskda-retention-0.999"].preconditioner["retention"] == 0.999
    assert found["osgdn-apf-learned"].preconditioner["retention"] == "learned"


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        ("training.stesp=3", "unknown key training.stesp; did you mean steps?"),
        ("optimiser.eps=3", "unknown key optimiser; did you mean optimizer?"),
        ("model.hidden_sizes=3", "unknown key model.hidden_sizes; did you mean hidden_size?"),
        ("model.preset=osdn-35m", "there is no preset 'osdn-35m'"),
        ("training.steps=many", "training.steps is 'many'; it must be of type int"),
        ("training.steps=true", "training.steps is True; it must be of type int"),
        ("training.steps=0", "training.steps is 0; it must be positive"),
        ("data.streaming=1", "data.streaming is 1; it must be of type bool"),
        ("optimizer.betas=0.9", "optimizer.betas is 0.9; it must be of type list"),
        ("optimizer.betas=[0.9]", ".*it must be two numbers from 0 up to 1"),
        ("optimizer.learning_rate=.inf", ".*it must be finite"),
        ("optimizer.weight_decay=-1.0", "optimizer.weight_decay is -1.0; it must not be negative"),
        ("data.context_len=1", ".*a piece of one token has nothing to predict"),
        ("output_dir.x=1", ".*output_dir is a value, not a section"),
        ("training.steps=[", ".*is not YAML"),
        (
            "training.precision=float16",
            "training.precision is 'float16'; it must be one of bfloat16",
        ),
        ("data=3", "data must hold keys and values, got 3"),
        ("training.steps", "'training.steps' must be of the form section.key=value"),
    ],
)
def test_a_mistake_is_told_by_its_name(write_config, replacement, message):
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?")):
        load_settings(write_config(), [replacement])


def test_a_missing_key_is_told_by_its_name(write_config):
    path = write_config()
    path.write_text(path.read_text().replace("  warmup_steps: 3\n", "").replace("  keep: 3\n", ""))
    with pytest.raises(ValueError, match=r"^optimizer.warmup_steps must be set"):
        load_settings(path)
    with pytest.raises(FileNotFoundError, match="there is no config"):
        load_settings(path.with_name("other.yaml"))


def test_numbers_in_scientific_notation_are_numbers(write_config):
    assert load_settings(write_config(), ["optimizer.learning_rate=1e-3"]).optimizer.learning_rate == 1e-3


def test_a_step_that_the_devices_cannot_share_is_refused_with_the_reason(write_config):
    settings = load_settings(write_config())
    assert [settings.accumulation(n) for n in (1, 2)] == [2, 1]
    with pytest.raises(ValueError, match="tokens_per_step is 192, which is not a multiple of the 288 tokens"):
        settings.accumulation(3)
