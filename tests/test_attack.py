"""`make attack` for a few seconds."""

import subprocess
import sys

import pytest

from tests.attack import ATTACKS

pytestmark = pytest.mark.slow
CODE_IS_RUN = "import pickle; from osdn.training import shards; shards._Unpickler = pickle.Unpickler; "
DAMAGE_IS_MISSED = "from osdn.training import checkpoints; checkpoints.damage = lambda *_: None; "


def attack(*arguments, first=""):
    call = f"import sys; {first}from tests.attack import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", call, *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize("kind", ATTACKS)
def test_every_attack_is_survived(kind):
    done = attack("--minutes", "0.1", "--seed", "0", "--only", kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind:18}  " in done.stdout.splitlines()[-1]
    assert "FAILED" not in done.stdout


@pytest.mark.parametrize(
    ("kind", "broken"),
    [("plant_code", CODE_IS_RUN), ("damage_checkpoints", DAMAGE_IS_MISSED)],
    ids=["code", "damage"],
)
def test_a_successful_attack_is_reported_with_its_seed(kind, broken):
    done = attack("--minutes", "0.2", "--seed", "0", "--only", kind, first=broken)
    assert done.returncode == 1, done.stdout
    seed = next(line.split()[3] for line in done.stdout.splitlines() if "FAILED" in line)
    again = attack("--replay", kind, seed, first=broken)
    assert again.returncode == 1, again.stdout
    assert seed in again.stdout
