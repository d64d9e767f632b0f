"""The kernels' tests run on a GPU where there is one, and in Triton's interpreter elsewhere.

The interpreter multiplies matrices more exactly than a GPU, gets products and roundings of bfloat16 wrong,
and looks up all of `triton.language` at every call of a function.  The fixtures below mend all three.
CPython, too, can take and give back a page of memory at every call of a function.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device"))


def _roomy(function):
    """`function`, called with a quarter of a megabyte for the frames of what it calls.

    CPython keeps frames in pieces of 16 KiB, and maps a piece for a call that meets the end of one, only to
    unmap it on the return: a loop that happens to be at that depth takes four times as long.  A frame that
    needs a large piece brings the rest of it along.
    """

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=2**15)
    return call


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter():
    """A kernel's launch patches the language for all functions it calls; once is enough."""
    if GPU:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        scope = interpreter._patch_lang(tl.zeros.fn)
        call = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)  # noqa: E731
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(interpreter.GridExecutor, "__call__", _roomy(interpreter.GridExecutor.__call__))
        yield
        scope.restore()


@pytest.fixture
def tensor_cores(monkeypatch):
    """The interpreter rounds as an H100 does: the factors of products in TF32, bfloat16 to nearest.

    Returns the multiply-adds done, those of 16-bit and of float32 factors.
    """
    if GPU:
        pytest.skip("a GPU rounds by itself")
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from osdn.ops.triton import launch

    done = {"operands": 0, "floats": 0}

    def tf32(x):
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)

    def values(x):
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data.astype(np.float32)

    def create_dot(self, a, b, d, precision, _):
        single, size = a.dtype.scalar == tl.float32, a.data.size * b.data.shape[-1]
        a, b = values(a), values(b)
        done["floats" if single else "operands"] += size
        if single and precision == ir.INPUT_PRECISION.TF32:
            product = tf32(a) @ tf32(b)
        elif single and precision == ir.INPUT_PRECISION.TF32x3:
            done["floats"] += 2 * size
            high_a, high_b = tf32(a), tf32(b)
            product = tf32(a - high_a) @ high_b + high_a @ tf32(b - high_b) + high_a @ high_b
        else:
            product = a @ b
        return TensorHandle(product + d.data, d.dtype.scalar)

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self, x, to):
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(x.data).view(np.uint32)
            return TensorHandle(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), to.scalar)
        return cast(self, x, to)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    for name in ("create_fp_ext", "create_fp_trunc"):
        monkeypatch.setattr(InterpreterBuilder, name, cast_impl)
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90")
    return done
