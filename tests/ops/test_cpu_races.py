"""The kernels' threads under ThreadSanitizer, in a program without Python: races.cpp."""

import subprocess
from pathlib import Path

import pytest

from osdn.ops.cpu import build

RACES = Path(__file__).with_name("races.cpp")
FLAGS = ["-std=gnu++17", "-O1", "-g", "-fsanitize=thread", f"-I{build.SOURCES}"]


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["native", "x86-64"])
def test_threads_do_not_race_and_give_the_answer_of_one(cpu: str, tmp_path: Path) -> None:
    try:
        compiler = build._compiler()
    except build.BuildError:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "races"
    made = build._run([compiler, str(RACES), *FLAGS, f"-march={cpu}", "-o", str(program)])
    if made.returncode:
        if "tsan" in made.stderr or "-march" in made.stderr:
            pytest.skip("this compiler has no ThreadSanitizer, or another kind of CPU")
        pytest.fail(made.stderr)
    # Without address randomisation: some kernels randomise more bits than ThreadSanitizer can take.
    done = subprocess.run(["setarch", "-R", str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the answer of one thread" in done.stdout
