"""The kernels' compilation: cached, safe between processes, and never in the way when it cannot be done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from osdn.ops import available_backends

RUN = """
import torch, warnings
from osdn.ops import available_backends, delta_rule
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.randn(1, 3, 1, 4)
    for _ in range(2):
        delta_rule(x, x, x, torch.rand(1, 3, 1))
mine = [w for w in caught if "CPU kernels" in str(w.message)]
print(available_backends()[0], len(mine), *(str(w.message) for w in mine))
"""


def start(**environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", RUN], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.skipif("cpu" not in available_backends(), reason="needs a C++ compiler")
def test_the_cache_is_shared_kept_and_its_damage_reported(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "OSDN_CXXFLAGS": "-O0"}
    for out, err in map(finish, [start(**environment) for _ in range(2)]):  # both compile, at once
        assert out.startswith("cpu 0")
        assert "compiling the float CPU kernels" in err
    (library,) = (tmp_path / "osdn").iterdir()
    assert library.suffix == ".so"

    out, err = finish(start(**environment))
    assert out.startswith("cpu 0")
    assert "compiling" not in err

    library.write_bytes(b"not a library")
    out, _ = finish(start(**environment))
    assert out.startswith("chunkwise 1 ")
    assert str(library) in out


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"PATH": "/nonexistent", "CXX": ""}, "no C++ compiler was found; install g++"),
        ({"CXX": "/nonexistent/c++"}, "CXX is '/nonexistent/c++', which cannot be found"),
        ({"OSDN_CXXFLAGS": "-not-a-flag"}, "failed:"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "cannot be created"),
    ],
    ids=["no-compiler", "wrong-CXX", "failing-compile", "no-cache"],
)
def test_without_kernels_there_is_one_warning_and_chunkwise(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), **environment}
    out, _ = finish(start(**environment))
    assert out.startswith("chunkwise 1 ")
    assert reason in out
