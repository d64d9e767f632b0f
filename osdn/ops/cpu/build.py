"""Compiles kernels.cpp on first use and keeps the result.

The library has no dependency but OpenMP, so one compiler call of about 20 seconds makes it.  It is cached
under a name that is a digest of the source, the compiler, its flags and the CPU, so that an upgraded compiler
or a home directory shared by different machines cannot mix up each other's files.  What is loaded runs with
the user's rights: the cache must be a folder that only the user can write to, and a library must match the
SHA-256 that was stored when it was compiled.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout

SOURCES = Path(__file__).parent
FLAGS = ["-O2", "-march=native", "-std=gnu++17", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared"]
TIMEOUT = 600  # seconds; a compiler that takes longer hangs
BUILDS = "build-"  # how the names of temporary folders begin


class BuildError(RuntimeError):
    """Why there is no compiled library, in a sentence the user can act on."""


class Cache(NamedTuple):
    """The folder of compiled libraries, open and found to be the user's own."""

    path: Path  # as the user and the compiler know it
    held: Path  # by its descriptor: still the checked folder when somebody renames things on the way to it


def library(real: str) -> ctypes.CDLL:
    """The kernels for `real`, "float" or "double": from the cache, else compiled now."""
    if os.name != "posix":
        raise BuildError("they need Linux or macOS")
    compiler = _compiler()
    flags = [*FLAGS, f"-DREAL={real}", *os.environ.get("OSDN_CXXFLAGS", "").split(), *_openmp_runtime()]
    name = f"kernels-{real}-{_digest(compiler, flags)}.so"
    with _open_cache() as cache:
        try:
            if not _is_whole(cache, name):
                _make(cache, name, compiler, flags, real)
            return ctypes.CDLL(str(cache.held / name))
        except OSError as error:
            raise BuildError(f"{cache.path} cannot be used ({error}); set XDG_CACHE_HOME") from error


def _compiler() -> str:
    cxx = os.environ.get("CXX")
    for name in [cxx] if cxx else ["g++", "clang++", "c++"]:
        compiler = shutil.which(name)
        if compiler:
            return compiler
    if cxx:
        raise BuildError(f"CXX is {cxx!r}, which cannot be found; point it at a C++ compiler or unset it")
    raise BuildError("no C++ compiler was found; install g++ or clang++, or set CXX to one")


def _openmp_runtime() -> list[str]:
    """PyTorch's own OpenMP library where it ships one: two thread pools would fight over the cores."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0]), f"-Wl,-rpath,{bundled[0].parent}"] if bundled else []


def _digest(compiler: str, flags: list[str]) -> str:
    version = _run([compiler, "--version"]).stdout
    sources = [*sorted(SOURCES.glob("*.h")), SOURCES / "kernels.cpp"]
    parts = [*(file.read_text(encoding="utf-8") for file in sources), compiler, version, *flags, *_cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> list[str]:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    keys = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.split("\t")[0].strip(" :") in keys})


def _run(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs a compiler, whose output may be in any encoding, and stops all of its processes if it hangs."""
    try:
        started = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror}); set CXX to another") from error
    with started as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} did not finish in {TIMEOUT} s; set CXX to another") from error
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextmanager
def _open_cache() -> Iterator[Cache]:
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osdn"
    except RuntimeError as error:
        raise BuildError("there is no home directory for the compiled kernels; set XDG_CACHE_HOME") from error
    if not path.is_absolute():
        raise BuildError(f"the cache {path} is a relative path; set XDG_CACHE_HOME to an absolute one")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BuildError(f"the cache {path} cannot be created ({error}); set XDG_CACHE_HOME") from error
    try:
        _check_owner(path, os.fstat(folder))
        held = Path(f"/proc/self/fd/{folder}")
        yield Cache(path, held if held.exists() else path)
    finally:
        os.close(folder)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):  # root could do anything anyway
        raise BuildError(
            f"{path} belongs to another user (uid {status.st_uid}), who could plant code there; "
            "delete it, or set XDG_CACHE_HOME to a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{path} is writable by other users, who could plant code there; delete it, or `chmod go-w` it "
            "if you know that nobody did"
        )


def _is_whole(cache: Cache, name: str) -> bool:
    """Whether the library is there as it was compiled: a truncated one would crash the process."""
    contents, digest = _read(cache, name), _read(cache, f"{name}.sha256")
    return contents is not None and digest == _checksum(name, contents)


def _read(cache: Cache, name: str) -> bytes | None:
    try:
        with open(cache.held / name, "rb") as file:
            _check_owner(cache.path / name, os.fstat(file.fileno()))
            return file.read()
    except FileNotFoundError:
        return None


def _checksum(name: str, contents: bytes) -> bytes:
    """A line for `sha256sum --check`."""
    return f"{hashlib.sha256(contents).hexdigest()}  {name}\n".encode()


def _make(cache: Cache, name: str, compiler: str, flags: list[str], real: str) -> None:
    """Compiles a library into the cache; of several processes one does it and the others wait."""
    try:
        with FileLock(cache.held / "lock", timeout=2 * TIMEOUT):
            if _is_whole(cache, name):  # compiled by another process while we waited
                return
            for abandoned in cache.held.glob(f"{BUILDS}*"):  # by a process that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
            contents = _compile(cache, compiler, flags, real)
            _write(cache, f"{name}.sha256", _checksum(name, contents))
            _write(cache, name, contents)
    except Timeout as error:
        raise BuildError(f"another process has held {cache.path / 'lock'} for {2 * TIMEOUT} s") from error


def _compile(cache: Cache, compiler: str, flags: list[str], real: str) -> bytes:
    print(f"osdn: compiling the {real} CPU kernels into {cache.path}", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix=BUILDS, dir=cache.held)).name
    try:
        output = cache.path / folder / "kernels.so"
        command = [compiler, str(SOURCES / "kernels.cpp"), *flags, "-o", str(output)]
        process = _run(command, TMPDIR=str(output.parent))
        if process.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{process.stderr.strip()[-2000:]}")
        return (cache.held / folder / output.name).read_bytes()
    finally:
        shutil.rmtree(cache.held / folder, ignore_errors=True)
        print(f" ({time.perf_counter() - start:.1f} s)", file=sys.stderr)


def _write(cache: Cache, name: str, contents: bytes) -> None:
    """Write all of a file or nothing.  A kill leaves at most the .part, which the next attempt overwrites."""
    part = cache.held / f"{name}.part"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())  # else a power failure can leave the name without the contents
    os.replace(part, cache.held / name)
