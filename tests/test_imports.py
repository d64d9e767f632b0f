"""What an import loads, and that the Auto classes find our models however things were imported."""

import ast
import json
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import osdn

HEAVY = {"torch", "torch._dynamo", "transformers", "numpy", "matplotlib", "datasets", "osdn.models"}


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str) -> set[str]:
    """Which of the heavy modules a fresh interpreter has after running `code`."""
    report = f"import json, sys; print(json.dumps([x for x in {sorted(HEAVY)} if x in sys.modules]))"
    return set(json.loads(run(f"{code}\n{report}").splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import osdn; dir(osdn); osdn.__version__; hasattr(osdn, 'no_such_name')") == set()


@pytest.mark.parametrize(
    "code",
    [
        "from osdn.ops import delta_rule",
        "import osdn; osdn.delta_rule; osdn.GatedDeltaNet; osdn.layers.TokenMixer; osdn.accelerate",
    ],
)
def test_operators_and_layers_load_torch_alone(code):
    assert loaded_by(code) == loaded_by("import torch")


def test_help_and_version_load_no_torch():
    code = """
from typer.main import get_command
from typer.testing import CliRunner
from osdn.cli import app

def walk(command, path):
    yield path
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from walk(command.get_command(None, name), [*path, name])

paths = list(walk(get_command(app), []))
assert ["lab", "recall"] in paths and ["bench", "ops"] in paths and len(paths) > 25, paths
for arguments in [["--version"], *([*path, "--help"] for path in paths)]:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    assert "Usage: " in done.output or done.output.startswith("osdn "), arguments
"""
    assert loaded_by(code) == set()


def test_the_command_itself_starts_without_torch():
    code = """
import runpy, sys
sys.argv = ["osdn", "--version"]
try: runpy.run_module("osdn")
except SystemExit as exit: assert exit.code == 0
"""
    assert loaded_by(code) == set()


# ------------------------------------------------------------------------------------------------ extras

ABSENT = """
import sys
class Absent:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in sys.argv[1].split() else find_spec(name, *more)
sys.meta_path.insert(0, Absent)
"""
OPTIONAL = "transformers datasets accelerate matplotlib pyarrow psutil yaml lm_eval fastapi uvicorn openai"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import osdn; osdn.OSDNConfig", 'osdn.models needs transformers: pip install "osdn[models]"'),
        ("from osdn.models import OSDNConfig", 'pip install "osdn[models]"'),
        ("import osdn.zoo", 'pip install "osdn[models]"'),
        ("import osdn.training.trainer", 'pip install "osdn[train]"'),
        ("import osdn.evaluation.suites", 'pip install "osdn[eval]"'),
        ("import osdn.lab.referee", 'pip install "osdn[lab]"'),
        ("import osdn.analysis.diagnose", 'pip install "osdn[lab]"'),
    ],
)
def test_a_missing_extra_is_named_with_its_command(code, message):
    attempt = f"try: exec({code!r})\nexcept ModuleNotFoundError as error: print(error)"
    assert message in run(ABSENT + attempt, OPTIONAL)


def test_every_command_names_the_extra_that_it_lacks():
    code = """
from typer.testing import CliRunner
from osdn.cli import app
commands = {
    "models": ["describe osdn-tiny", "zoo"],
    "train": ["train tiny/osdn", "convert a b", "tokenizer train stdlib out"],
    "eval": ["eval model"],
    "serve": ["serve model"],
    "lab": ["demo", "lab recall", "lab referee --quick", "lab write-gate", "diagnose model", "theory",
            "inspect model --prompt x", "bench ops", "bench throughput", "bench training", "bench zoo",
            "compare runs", "report runs", "plot runs"],
}
for extra, lines in commands.items():
    for line in lines:
        done = CliRunner().invoke(app, line.split())
        said = " ".join(done.output.split())
        assert done.exit_code == 1 and said.startswith("Error: "), (line, done.output, done.exception)
        assert said.endswith(f'pip install "osdn[{extra}]"') and " needs " in said, (line, said)
"""
    run(ABSENT + code, OPTIONAL)


def requirements(name: str) -> set[str]:
    """A distribution and everything that it requires here, extras aside."""
    found, waiting = set(), [name]
    while waiting:
        if (one := canonicalize_name(waiting.pop())) not in found:
            found.add(one)
            needed = map(Requirement, distribution(one).requires or [])
            waiting += [x.name for x in needed if x.marker is None or x.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_operators_and_layers_run_with_torch_and_numpy_alone(tmp_path):
    for name in requirements("torch") | {"numpy"}:
        files = distribution(name).files or []
        for part in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (tmp_path / part).symlink_to(distribution(name).locate_file(part))
    (tmp_path / "osdn").symlink_to(Path(osdn.__file__).parent)
    code = """
import sys
sys.path = [path for path in sys.path if "site-packages" not in path] + [sys.argv[1]]
import torch, osdn
for layer in (osdn.DeltaNet, osdn.GatedDeltaNet, osdn.KimiDeltaAttention):
    for preconditioner in (None, {"eta": 0.003}, {"rule": "newton"}, {"rule": "pgdn"}):
        mixer = layer(32, num_heads=2, head_k_dim=16, head_v_dim=16, preconditioner=preconditioner)
        y, state = mixer(torch.randn(2, 20, 32), output_final_state=True)
        y.sum().backward()
        mixer(torch.randn(2, 1, 32), state)
try: osdn.OSDNConfig
except ModuleNotFoundError as error: print(error)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout == 'osdn.models needs transformers: pip install "osdn[models]"\n', done.stderr


# ------------------------------------------------------------------------------------- names at the top


def _declared() -> dict[str, str]:
    """The names that the type checker is told about, and the module each comes from."""
    tree = ast.parse(Path(osdn.__file__).read_text())
    block = next(x for x in tree.body if isinstance(x, ast.If))
    imports = [x for x in block.body if isinstance(x, ast.ImportFrom)]
    return {name.asname or name.name: str(x.module) for x in imports for name in x.names}


def test_every_public_name_is_what_the_type_checker_sees():
    declared = _declared()
    assert sorted(declared) == sorted(osdn.__all__)
    assert set(osdn.__all__) <= set(dir(osdn))
    for name, module in declared.items():
        namespace = {}
        exec(f"from {module} import {name} as there", namespace)
        assert getattr(osdn, name) is namespace["there"]


def test_operators_layers_and_models_are_all_at_the_top():
    from osdn import layers, models, ops

    assert {*ops.__all__, *models.__all__} <= set(osdn.__all__)
    assert {x for x in layers.__all__ if isinstance(getattr(layers, x), type)} >= {
        "DeltaNet",
        "GatedDeltaNet",
        "KimiDeltaAttention",
    }
    assert osdn.describe is osdn.describe_model


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'osdn' has no attribute 'GatedDeltaNets'"):
        _ = osdn.GatedDeltaNets


# ----------------------------------------------------------------------------------------- Auto classes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    osdn.OSDNForCausalLM(osdn.OSDNConfig.from_preset("osdn-apf-tiny", num_hidden_layers=1)).save_pretrained(
        folder
    )
    return str(folder)


LOAD = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model).__module__, type(model).__name__)
"""
LOADED = "osdn.models.modeling_osdn OSDNForCausalLM"


def test_auto_classes_find_our_models_when_osdn_comes_first(checkpoint):
    check = "import osdn, sys; from transformers import AutoConfig; assert 'osdn.models' not in sys.modules"
    assert run(f"{check}\n{LOAD}", checkpoint).strip() == LOADED


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import transformers\nimport osdn",
        "import transformers\ntransformers.AutoModelForCausalLM\nimport osdn",
        "from transformers import AutoConfig\nimport osdn",
        "from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer\nimport osdn",
        "from osdn.ops import delta_rule\nimport transformers",
        "from osdn.models import OSDNConfig\nimport transformers",
        "import osdn\nfrom osdn import OSDNForCausalLM",
        "import osdn\nosdn.accelerate()",
        "import osdn.layers\nimport transformers.modeling_layers",
        "import torch, osdn, importlib\nimportlib.reload(osdn)",
    ],
)
def test_auto_classes_find_our_models_in_every_order(first, checkpoint):
    assert run(first + LOAD, checkpoint).strip() == LOADED


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "from transformers import AutoConfig; x = AutoConfig.from_pretrained(sys.argv[1])",
        "from transformers import AutoConfig; x = AutoConfig.for_model('osdn', hidden_size=64, num_heads=2)",
        "from transformers import AutoModel; x = AutoModel.from_pretrained(sys.argv[1])",
        "import transformers as t; x = t.AutoModelForSequenceClassification.from_pretrained(sys.argv[1])",
        "from transformers import AutoConfig, AutoModelForTokenClassification as A\n"
        "x = A.from_config(AutoConfig.from_pretrained(sys.argv[1]))",
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING\n"
        "assert 'osdn' in CONFIG_MAPPING; dict(CONFIG_MAPPING.items()); x = CONFIG_MAPPING['osdn']()",
        "from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as M; list(M.keys()); import osdn\n"
        "x = M[osdn.OSDNConfig](osdn.OSDNConfig.from_preset('osdn-tiny'))",
    ],
)
@pytest.mark.parametrize("order", ["osdn first", "transformers first"])
def test_every_auto_class_knows_us(code, order, checkpoint):
    imports = "import osdn" if order == "osdn first" else "import transformers.models.auto, osdn"
    found = run(f"import sys\n{imports}\n{code}\nprint(type(x).__module__)", checkpoint)
    assert found.startswith("osdn.models.")
