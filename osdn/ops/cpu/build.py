"""Compiles kernels.cpp on first use and keeps the result.

The library has no dependency but OpenMP, so one compiler call of a few seconds makes it.  It is cached under
a name that is a digest of the source, the compiler, its flags and the CPU, and is moved into place in one
step: processes that compile at once, an upgraded compiler or a home directory shared by different machines
cannot mix up each other's files.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
FLAGS = ["-O2", "-march=native", "-std=gnu++17", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared"]


class BuildError(RuntimeError):
    """Why there is no compiled library, in a sentence the user can act on."""


def library(real: str) -> ctypes.CDLL:
    """The kernels for `real`, "float" or "double": from the cache, else compiled now."""
    compiler = _compiler()
    flags = [*FLAGS, f"-DREAL={real}", *os.environ.get("OSDN_CXXFLAGS", "").split(), *_openmp_runtime()]
    path = _cache() / f"kernels-{real}-{_digest(compiler, flags)}.so"
    if not path.exists():
        _compile(compiler, flags, path, real)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded ({error}); delete it to have it made again") from error


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        found = shutil.which(name)
        if found:
            return found
    if wanted:
        raise BuildError(f"CXX is {wanted!r}, which cannot be found; point it at a C++ compiler or unset it")
    raise BuildError("no C++ compiler was found; install g++ or clang++, or set CXX to one")


def _openmp_runtime() -> list[str]:
    """PyTorch's own OpenMP library where it ships one: two thread pools would fight over the cores."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0]), f"-Wl,-rpath,{bundled[0].parent}"] if bundled else []


def _cache() -> Path:
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osdn"
    except RuntimeError as error:
        raise BuildError("there is no home directory for the compiled kernels; set XDG_CACHE_HOME") from error
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the cache {path} cannot be created ({error}); set XDG_CACHE_HOME") from error
    return path


def _digest(compiler: str, flags: list[str]) -> str:
    version = _run([compiler, "--version"]).stdout
    parts = [*(file.read_text(encoding="utf-8") for file in _sources()), compiler, version, *flags, *_cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """A compiler's words may be in any encoding."""
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)


def _sources() -> list[Path]:
    return [*sorted(FOLDER.glob("*.h")), FOLDER / "kernels.cpp"]


def _cpu() -> list[str]:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    keys = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.split("\t")[0].strip(" :") in keys})


def _compile(compiler: str, flags: list[str], path: Path, real: str) -> None:
    print(f"osdn: compiling the {real} CPU kernels into {path.parent}", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, str(FOLDER / "kernels.cpp"), *flags, "-o", str(made)]
            done = _run(command)
            if done.returncode:
                raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
            os.replace(made, path)  # atomic: a reader sees a whole file or none
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error}); set XDG_CACHE_HOME") from error
    finally:
        print(f" ({time.perf_counter() - start:.1f} s)", file=sys.stderr)
