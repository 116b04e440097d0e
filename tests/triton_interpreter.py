"""Running a Triton kernel without a GPU: Triton interprets it, in a process of its own.

Whether Triton interprets is decided when it is imported, by TRITON_INTERPRET, for its own library
too (`tl.max` is under `triton.jit`), and tests that compile need the other. So one process, started
when the first test asks, interprets for all.
"""

import concurrent.futures
import functools
import multiprocessing
import os

import ml_dtypes
import numpy as np
import pytest

POISON = 0xA5  # each byte of a result before the kernel writes it
MARGIN = 4096  # bytes before and behind an array; those of x are NaN in every dtype

# One, because Triton's interpreter has one program number for all devices of a mesh; and not XLA's
# own, where NumPy would lose what is below 2^-126.
_THREAD = concurrent.futures.ThreadPoolExecutor(1)

# Triton's names of types.
FLOATS = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
}


def needs_triton():
    """Skips the test that calls it where there are no kernels."""
    pytest.importorskip("triton", reason="needs the extra triton")
    pytest.importorskip(
        "jax_triton", reason="jax-triton before 0.4 needs the CUDA wheels", exc_type=ImportError
    )


def interpreted(function, *arguments):
    """What a function of a module gives, its kernels interpreted.

    The leaves, NumPy arrays of bytes.

    Fails if one writes outside of its results.
    """
    needs_triton()
    return _process().submit(_run, function, *arguments).result(timeout=300)


@functools.cache
def _process():
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn, initializer=_start)


def _start():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    interpreter._convert_float = functools.partial(_convert, interpreter._convert_float)
    # begins now: a thread takes how to treat small numbers from the one that starts it
    _THREAD.submit(int).result()


def _convert(otherwise, x, source, target, rounding):
    """In place of the interpreter's own casts, which lose carries, round ties up, and wrap around.

    NVIDIA's conversion to FP8 saturates; here what is too large becomes NaN or inf, so that kernels
    have to clip.
    """
    if source.name not in FLOATS or target.name not in FLOATS:
        return otherwise(x, source, target, rounding)
    values = np.ascontiguousarray(x).view(FLOATS[source.name]).astype(np.float32)
    return values.astype(FLOATS[target.name]).view(f"u{target.primitive_bitwidth // 8}")


def _run(function, *arguments):
    import jax

    from jaxfp8.kernels import _dispatch
    from jaxfp8.kernels.adamw import _triton as _adamw
    from jaxfp8.kernels.quantize import _triton

    _triton.triton_call = _adamw.triton_call = _call
    _dispatch.platform_dependent = lambda *arrays, cuda, default: cuda(*arrays)
    leaves = jax.tree.leaves(function(*arguments))
    return [np.atleast_1d(np.asarray(leaf)).view(np.uint8) for leaf in leaves]


def _call(*arrays, kernel, results, grid, warps, compute_capability, overwrites=(), **constants):
    """In place of `jaxfp8.kernels._triton_call.triton_call`."""
    import jax

    del warps, compute_capability
    if overwrites:
        constants |= dict.fromkeys(name for name in kernel.arg_names if name.startswith("same_"))

    def run(*arrays):
        given = [Memory(x.shape, x.dtype, 0xFF) for x in arrays]
        for memory, x in zip(given, arrays, strict=True):
            memory.array[...] = np.asarray(x)
        written = [given[i] for i in overwrites] or [
            Memory(result.shape, result.dtype, POISON) for result in results
        ]
        pointers = given if overwrites else [*given, *written]
        _THREAD.submit(kernel[(grid,)], *pointers, **constants).result()
        assert all(memory.margins_are_whole() for memory in pointers), "written outside of an array"
        return [memory.array for memory in written]

    return jax.pure_callback(run, list(results), *arrays)


class Memory:
    """An array in the middle of bytes that nothing may write.

    With what Triton's interpreter asks of a torch.Tensor.
    """

    def __init__(self, shape, dtype, filling):
        self.dtype, self.filling = np.dtype(dtype), filling
        size = int(np.prod(shape)) * self.dtype.itemsize
        self.bytes = np.full(size + 2 * MARGIN, filling, np.uint8)
        self.array = self.bytes[MARGIN : MARGIN + size].view(self.dtype).reshape(shape)

    def margins_are_whole(self):
        return (self.bytes[:MARGIN] == self.filling).all() and (
            self.bytes[-MARGIN:] == self.filling
        ).all()

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *size, device):
        return self

    def set_(self, *of):
        pass

    def copy_(self, other):
        pass

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides
