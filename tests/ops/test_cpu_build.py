"""The kernels' compilation: cached, safe between processes and users, and never in the way when it fails."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osdn.ops import available_backends
from osdn.ops.cpu import build

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

needs_compiler = pytest.mark.skipif("cpu" not in available_backends(), reason="needs a C++ compiler")


def start(**environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", RUN], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, err


@needs_compiler
def test_the_cache_is_kept_and_damage_to_it_mended(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "OSDN_CXXFLAGS": "-O0"}
    out, err = finish(start(**environment))
    assert out.startswith("cpu 0")
    assert "compiling the float CPU kernels" in err

    out, err = finish(start(**environment))
    assert out.startswith("cpu 0")
    assert "compiling" not in err

    (library,) = tmp_path.glob("osdn/*.so")
    os.truncate(library, library.stat().st_size // 2)  # loading this would kill the process
    out, err = finish(start(**environment))
    assert out.startswith("cpu 0")
    assert "compiling the float CPU kernels" in err


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


def test_a_compiler_that_cannot_be_started_means_chunkwise(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_bytes(b"not a program")
    broken.chmod(0o700)
    out, _ = finish(start(XDG_CACHE_HOME=str(tmp_path), CXX=str(broken)))
    assert out.startswith("chunkwise 1 ")
    assert f"{broken} cannot be run (Exec format error); set CXX to another" in out


# Below, a compiler that makes an empty library at once, writes down that it ran, and waits if told to.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit; fi
echo run >> {log}
for last; do :; done
touch $TMPDIR/intermediate
{wait}
exec {real} -shared -fPIC -x c++ /dev/null -o $last
"""


class Compiler:
    def __init__(self, folder: Path, real: str) -> None:
        self.script, self.log, self.real = folder / "compiler", folder / "log", real
        self.waits("")

    def waits(self, command: str) -> None:
        text = COMPILER.format(log=self.log, wait=command, real=self.real)
        self.script.write_text(text)
        self.script.chmod(0o700)

    def runs(self) -> int:
        return self.log.read_text().count("run") if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    try:
        fake = Compiler(tmp_path, build._compiler())
    except build.BuildError:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("CXX", str(fake.script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


@pytest.fixture
def cache(compiler: Compiler, tmp_path: Path) -> Path:
    """A cache in which the library has been made."""
    build.library("float")
    assert compiler.runs() == 1
    return tmp_path / "cache" / "osdn"


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def in_processes(count: int) -> list[multiprocessing.Process]:
    processes = [
        multiprocessing.get_context("fork").Process(target=build.library, args=("float",))
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def kept(cache: Path) -> list[str]:
    return sorted(path.name.split("-")[0] + path.suffix for path in cache.iterdir())


WHOLE = ["kernels.sha256", "kernels.so", "lock"]


def test_the_cache_is_for_its_owner_alone(cache: Path) -> None:
    assert cache.stat().st_mode & 0o777 == 0o700
    assert kept(cache) == WHOLE
    library = only(cache, "*.so")
    assert library.stat().st_mode & 0o077 == 0
    digest = only(cache, "*.sha256").read_text()
    assert digest == f"{hashlib.sha256(library.read_bytes()).hexdigest()}  {library.name}\n"


def replace_content(path: Path, content: bytes) -> None:
    """Other bytes in a new file: the old one may be mapped into this process, which would die with it."""
    path.unlink()
    path.write_bytes(content)


DAMAGE = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: replace_content(path, b""),
    "cut": lambda path: replace_content(path, path.read_bytes()[:-100]),
    "zeroed": lambda path: replace_content(path, bytes(path.stat().st_size)),
    "foreign": lambda path: replace_content(path, b"not what was written"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("which", ["*.so", "*.sha256"])
def test_a_damaged_file_is_made_again(damage, which, cache: Path, compiler: Compiler) -> None:
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    damage(only(cache, which))
    build.library("float")
    assert compiler.runs() == 2
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before
    build.library("float")
    assert compiler.runs() == 2


def test_an_untouched_library_is_not_made_again(cache: Path, compiler: Compiler) -> None:
    build.library("float")
    assert compiler.runs() == 1


@pytest.mark.parametrize("which", [".", "*.so", "*.sha256"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_refused(which: str, mode: int, cache: Path, compiler: Compiler) -> None:
    path = cache if which == "." else only(cache, which)
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(build.BuildError, match=f"{path} is writable by other users"):
        build.library("float")
    assert compiler.runs() == 1


@pytest.mark.parametrize("which", [".", "*.so", "*.sha256"])
def test_what_belongs_to_another_user_is_refused(which: str, cache: Path, monkeypatch) -> None:
    path = cache if which == "." else only(cache, which)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        path = cache
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(build.BuildError, match=f"{path} belongs to another user"):
        build.library("float")


def test_a_relative_cache_is_refused(compiler: Compiler, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    with pytest.raises(build.BuildError, match="set XDG_CACHE_HOME to an absolute one"):
        build.library("float")
    assert not (tmp_path / "here").exists()


def test_a_folder_that_is_swapped_after_the_check_is_not_loaded_from(cache: Path, monkeypatch) -> None:
    checked = build._is_whole

    def swap(*arguments) -> bool:
        answer = checked(*arguments)
        cache.rename(cache.with_name("moved"))
        cache.mkdir()
        (cache / only(cache.with_name("moved"), "*.so").name).write_bytes(b"planted")
        return answer

    monkeypatch.setattr(build, "_is_whole", swap)
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: Path(path).read_bytes())
    assert build.library("float") != b"planted"


def test_processes_that_start_at_once_run_one_compiler(tmp_path: Path, compiler: Compiler) -> None:
    compiler.waits("sleep 0.5")
    for process in in_processes(8):
        process.join(60)
        assert process.exitcode == 0
    assert compiler.runs() == 1
    assert kept(tmp_path / "cache" / "osdn") == WHOLE


def test_a_compiler_that_hangs_is_stopped(compiler: Compiler, tmp_path: Path, monkeypatch) -> None:
    compiler.waits(f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setattr(build, "TIMEOUT", 0.5)
    with pytest.raises(build.BuildError, match=r"did not finish in 0\.5 s"):
        build.library("float")
    child = int((tmp_path / "child").read_text())
    assert wait_for(lambda: not running(child)), "what the compiler had started still runs"
    assert kept(tmp_path / "cache" / "osdn") == ["lock"]


def test_a_lock_that_is_never_released_is_not_waited_for_for_ever(compiler, tmp_path, monkeypatch) -> None:
    compiler.waits("sleep 2")
    (holder,) = in_processes(1)
    assert wait_for(lambda: compiler.runs() == 1)
    monkeypatch.setattr(build, "TIMEOUT", 0.2)
    with pytest.raises(build.BuildError, match="another process has held"):
        build.library("float")
    holder.join(60)


def test_nothing_is_left_of_a_killed_compilation(compiler: Compiler, tmp_path: Path) -> None:
    compiler.waits(f"echo $$ > {tmp_path}/child; sleep 1000")
    (process,) = in_processes(1)
    assert wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    process.kill()
    process.join(60)
    os.killpg(int((tmp_path / "child").read_text()), signal.SIGKILL)
    folder = tmp_path / "cache" / "osdn"
    assert len(kept(folder)) > 1, "the kill came before there was anything to clean up"
    compiler.waits("")
    build.library("float")
    assert kept(folder) == WHOLE


def test_a_kill_between_two_files_is_made_good(compiler: Compiler, tmp_path: Path, monkeypatch) -> None:
    """The checksum is there and the library is half written."""
    real = os.replace

    def killed(source, target) -> None:
        if str(target).endswith(".so"):
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            build.library("float")
    build.library("float")
    assert kept(tmp_path / "cache" / "osdn") == WHOLE


def wait_for(condition, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
