"""Settings: every shipped config is complete and matches the paper; mistakes are reported by name."""

from pathlib import Path

import pytest
import yaml

from osdn import PRESETS
from osdn.training.settings import config_names, load_settings

ABLATIONS = ["osdn-beta-unaware", "osdn-d0", "osdn-d0-free", "osgdn-apf-learned", "oskda-retention-0.999"]


@pytest.mark.parametrize("config", config_names())
def test_a_config_loads_and_has_its_own_name_and_directory(config, tmp_path):
    size, model = config.split("/")
    settings = load_settings(config)
    assert settings.name == settings.model_config().run_name == f"{model}-{size}"
    assert settings.output_dir == f"runs/{size}/{model}"
    assert settings.accumulation(1) >= 1
    (tmp_path / "config.yaml").write_text(settings.to_yaml())  # as a run saves it
    assert load_settings(tmp_path / "config.yaml") == settings


def test_every_model_of_the_paper_has_a_config_and_ablations_have_two():
    plain = {name for name in config_names() if name.partition("/")[2] not in ABLATIONS}
    assert {load_settings(name).model["preset"] for name in plain} == set(PRESETS)
    assert all(load_settings(name).model.keys() == {"preset"} for name in plain)
    assert set(config_names()) - plain == {
        f"{size}/{name}" for size in ("tiny", "340m") for name in ABLATIONS
    }


@pytest.mark.parametrize("config", [name for name in config_names() if name.startswith("340m/")])
def test_the_340m_runs_match_the_paper(config):
    """Appendix "Training and Evaluation Reproduction Details"."""
    settings = load_settings(config)
    assert (settings.data.source, settings.data.name) == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert settings.data.tokenizer == "fla-hub/delta_net-1.3B-100B"
    assert (settings.data.seq_len, settings.data.context_len) == (65_536, 4_096)
    assert settings.optimizer.learning_rate == 1e-3
    assert settings.optimizer.max_grad_norm == 1.0
    assert settings.training.seed == 42
    assert settings.training.precision == "auto"
    assert (settings.accumulation(8), settings.accumulation(4)) == (1, 2)
    assert round(settings.training.steps * settings.training.tokens_per_step / 1e9, 2) == 10.74


@pytest.mark.parametrize("size", ["tiny", "340m"])
def test_the_ablations_match_the_paper(size):
    found = {name: load_settings(f"{size}/{name}").model_config() for name in ABLATIONS}
    changes = {
        "osdn-d0": ("osdn", {"initial_scale": "projected"}),
        "osdn-d0-free": ("osdn", {"initial_scale": "free"}),
        "osdn-beta-unaware": ("osdn", {"beta_aware": False}),
        "oskda-retention-0.999": ("oskda", {"retention": 0.999}),
        "osgdn-apf-learned": ("osgdn-apf", {"retention": "learned"}),
    }
    for name, (model, changed) in changes.items():
        original = load_settings(f"{size}/{model}").model_config()
        assert found[name].preconditioner == original.preconditioner | changed
        assert found[name].hidden_size == original.hidden_size


def test_a_users_config_can_build_on_a_shipped_one_or_on_another_file(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("own/first.yaml").write_text("base: tiny/osdn\nname: first\ntraining: {steps: 7}\n")
    Path("own/second.yaml").write_text("base: first.yaml\nmodel: {hidden_size: 96}\n")
    first, second = load_settings("own/first.yaml"), load_settings(Path("own/second.yaml"), ["name=second"])
    shipped = load_settings("tiny/osdn")
    assert (first.name, first.training.steps, first.training.seed) == ("first", 7, 42)
    assert first.data == shipped.data
    assert second.model == {"preset": "osdn-tiny", "hidden_size": 96}
    assert (second.name, second.training.steps) == ("second", 7)
    assert "base" not in yaml.safe_load(second.to_yaml())


def test_one_setting_of_a_preconditioner_can_be_replaced(tmp_path):
    apf = load_settings("tiny/osdn-apf").model_config().preconditioner
    changed = load_settings("tiny/osdn-apf", ["model.preconditioner.eta=0.01"]).model_config().preconditioner
    assert apf["retention"] == "learned"
    assert changed == apf | {"eta": 0.01}
    (tmp_path / "own.yaml").write_text("base: tiny/osdn-apf\nmodel: {preconditioner: {eta: 0.01}}\n")
    assert load_settings(tmp_path / "own.yaml").model_config().preconditioner == changed
    newton = load_settings("tiny/osdn-apf", ["model.preconditioner={rule: newton}"]).model_config()
    assert newton.preconditioner["rule"] == "newton"
    assert newton.preconditioner["retention"] is None
    plain = load_settings("tiny/osdn-apf", ["model.preconditioner=null"]).model_config()
    assert plain.preconditioner is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a": "base: missing"},
            "a.yaml: base is missing, but there is no config .*missing; .*tiny/ delta",
        ),
        ({"a": "base: a.yaml"}, "a.yaml: base is a.yaml, which leads back to this file"),
        (
            {"a": "base: b.yaml", "b": "base: c.yaml", "c": "base: a.yaml"},
            "c.yaml: base is a.yaml",
        ),
        ({"a": "base: [b.yaml]"}, r"a.yaml: base is \['b.yaml'\]; it must be a file or the name"),
        ({"a": "base: ."}, "a.yaml: base is ., but .* is a directory; name a config in it"),
        ({"a": "base: b.yaml", "b": "- 1"}, "b.yaml must contain keys and values"),
        ({"a": "base: b.yaml", "b": "x: ["}, "b.yaml is not YAML"),
        ({"a": "base: tiny/_base"}, "there is no config .*_base"),
        ({"a": "base: b.yaml", "b": "training: {steps: 3}"}, "name, output_dir, model, data.* must be set"),
    ],
)
def test_a_base_that_cannot_be_used_is_reported(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises((ValueError, OSError), match=f"(?s){message}"):
        load_settings(tmp_path / "a.yaml")


def test_the_error_for_an_unknown_config_lists_the_shipped_ones(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        load_settings("tiny/odsn")
    assert str(error.value).startswith("there is no config tiny/odsn;")
    assert all(name.partition("/")[2] in str(error.value) for name in config_names())
    assert "_base" not in str(error.value)
    with pytest.raises(IsADirectoryError, match="is a directory; name a config in it"):
        load_settings(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\nb", "a\0b", " a", ".a", "a\x7f"])
def test_a_name_that_is_not_a_plain_file_name_is_rejected(write_config, name):
    with pytest.raises(ValueError, match=r"^name is .*; it is also used for files, so it must not"):
        load_settings(write_config(name=name))


@pytest.mark.parametrize("name", ["osdn-d0-340m", "Ünïcode 1.3b", "a$b_c"])
def test_a_plain_file_name_is_accepted(write_config, name):
    assert load_settings(write_config(name=name)).model_config().run_name == name


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
        ("optimizer.betas=[0.9]", r".*it must be two numbers in \[0, 1\)"),
        ("optimizer.learning_rate=.inf", ".*it must be finite"),
        ("optimizer.weight_decay=-1.0", "optimizer.weight_decay is -1.0; it must not be negative"),
        ("data.context_len=1", ".*it must be at least 2, or there is nothing to predict"),
        ("output_dir.x=1", ".*output_dir is a value, not a section"),
        ("training.steps=[", ".*is not YAML"),
        (
            "training.precision=float16",
            "training.precision is 'float16'; it must be one of auto, bfloat16",
        ),
        ("model.run_name=x", "unknown key model.run_name"),
        ("name=3", "name is 3; it must be of type str"),
        ("validation.split=train", "validation.split and data.split are both 'train'; validate on"),
        ("validation.tokens=0", "validation.tokens is 0; it must be positive"),
        ("validation.every=-1", "validation.every is -1; it must not be negative"),
        ("data=3", "data must contain keys and values, got 3"),
        ("training.steps", "'training.steps' must be of the form section.key=value"),
    ],
)
def test_a_mistake_is_reported_by_name(write_config, replacement, message):
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?")):
        load_settings(write_config(), [replacement])


def test_a_missing_key_is_reported_by_name(write_config):
    path = write_config()
    path.write_text(path.read_text().replace("  warmup_steps: 3\n", "").replace("  keep: 3\n", ""))
    with pytest.raises(ValueError, match=r"^optimizer.warmup_steps must be set"):
        load_settings(path)
    with pytest.raises(FileNotFoundError, match="there is no config"):
        load_settings(path.with_name("other.yaml"))


def test_numbers_in_scientific_notation_are_numbers(write_config):
    assert load_settings(write_config(), ["optimizer.learning_rate=1e-3"]).optimizer.learning_rate == 1e-3


def test_a_step_that_does_not_divide_among_the_devices_is_rejected(write_config):
    settings = load_settings(write_config())
    assert [settings.accumulation(n) for n in (1, 2)] == [2, 1]
    with pytest.raises(ValueError, match="tokens_per_step is 192, which is not a multiple of the 288 tokens"):
        settings.accumulation(3)
