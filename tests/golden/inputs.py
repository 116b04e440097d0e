"""Inputs of the golden bits: recipes, matmuls, and arrays with the same bits on every machine.

Arrays are made of the raw bits of PCG64, which NumPy promises never to change. It makes no such
promise for its distributions. No arithmetic touches the values, so nothing can round.
"""

import dataclasses
import functools
import zlib
from typing import Any

import ml_dtypes
import numpy as np

import jaxfp8 as fp8
from jaxfp8 import recipes

RECIPES = {
    "delayed": recipes.delayed(),
    "delayed, gradient E4M3": recipes.delayed(gradient=fp8.E4M3),
    "delayed, power_of_two": recipes.delayed(power_of_two=True),
    "delayed, margin 1": recipes.delayed(margin=1),
    "delayed, most_recent": recipes.delayed(algorithm="most_recent", history_length=3),
    "current": recipes.current(),
    "current, gradient E4M3": recipes.current(gradient=fp8.E4M3),
    "current, power_of_two": recipes.current(power_of_two=True),
    "rowwise": recipes.rowwise(),
    "rowwise, float32 scales": recipes.rowwise(power_of_two=False, gradient=fp8.E5M2),
    "rowwise, high_precision_wgrad": recipes.rowwise(high_precision_wgrad=True),
    "blockwise": recipes.blockwise(),
    "blockwise, float32 scales": recipes.blockwise(power_of_two=False, gradient=fp8.E5M2),
    "blockwise, w in 1D tiles": recipes.blockwise(w_tile_dim=1),
    "blockwise, x in 2D tiles": recipes.blockwise(x_tile_dim=2, w_tile_dim=1),
    "blockwise, g in 2D tiles": recipes.blockwise(g_tile_dim=2, w_tile_dim=1, power_of_two=False),
    "mxfp8": recipes.mxfp8(),
    "mxfp8, floor": recipes.mxfp8(scale_rounding="floor"),
    "mxfp8, w in 2D tiles": recipes.mxfp8(w_tile_dim=2),
    "static": recipes.static(x_scale=0.011, w_scale=0.0023, g_scale=1.1e-4),
}
STEPS = (0, 2, -1)
"""Powers of two that the arrays of each training step are larger by.

They rise and fall, so that the largest amax of a window is not the most recent one.
"""
_FIELDS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}  # bits: exponent, mantissa


def array(
    name: str, shape: tuple[int, ...], dtype: str, *, larger: int = 0, hard: bool = False
) -> np.ndarray:
    """Finite numbers of both signs over 12 binades, in rows of unequal size, with zeros.

    Args:
      name: other names give other numbers.
      shape: [..., columns].
      dtype: "bfloat16", "float16" or "float32".
      larger: the power of two that all of them are larger by.
      hard: with rows of subnormal and of huge numbers, an inf and a NaN.
    """
    exponent_bits, mantissa_bits = _FIELDS[dtype]
    word = np.dtype(np.uint32 if dtype == "float32" else np.uint16)
    seed = zlib.crc32(f"{name} {shape} {dtype}".encode())
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    sign, mantissa = raw & 1, (raw >> 1) & ((1 << mantissa_bits) - 1)
    exponent = ((raw >> 32) % 12).astype(np.int64).reshape(-1, shape[-1])
    row = np.arange(exponent.shape[0])[:, None]
    top = (1 << exponent_bits) - 2
    exponent += (top + 1) // 2 - 10 + larger + row % 5 - row % 3
    if hard:
        exponent = np.where(row % 11 == 3, 0, exponent)  # subnormal
        exponent = np.where(row % 13 == 4, top, exponent)  # up to the largest finite number
    bits = (sign << (exponent_bits + mantissa_bits)) | mantissa
    bits |= np.clip(exponent, 0, top).astype(np.uint64).reshape(-1) << mantissa_bits
    zero, minus_zero, whole_row = raw % 29 == 0, raw % 31 == 0, row % 7 == 5
    bits = np.where(np.broadcast_to(whole_row, exponent.shape).reshape(-1) | zero, 0, bits)
    bits = np.where(minus_zero, 1 << (exponent_bits + mantissa_bits), bits)
    if hard:
        infinite = (top + 1) << mantissa_bits
        bits[[len(bits) // 3, -1]] = infinite, infinite | 1 << (mantissa_bits - 1)
    values = bits.astype(word).reshape(shape)
    return values.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))


def positive(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 numbers in [2^-8, 2^8), for scales."""
    raw = np.random.PCG64(zlib.crc32(f"{name} {shape}".encode())).random_raw(int(np.prod(shape)))
    bits = ((119 + (raw >> 32) % 16) << 23) | (raw & 0x7FFFFF)
    return bits.astype(np.uint32).reshape(shape).view(np.float32)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One matmul: the shapes of x, w and y, and how jaxfp8 is called.

    Attributes:
      call: an einsum's equation, or dimension numbers of `dot_general`.
      hard_steps: the training steps with subnormal and huge numbers, inf and NaN.
      bias: the shape of a bias, or None.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    dtype: str
    call: Any
    hard_steps: tuple[int, ...] = ()
    bias: tuple[int, ...] | None = None

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """x, w, the gradient g of y, and the bias, if there is one."""
        larger, hard = STEPS[step], step in self.hard_steps
        shapes = {"x": self.x, "w": self.w, "g": self.y}
        if self.bias is not None:
            shapes["bias"] = self.bias
        kind = functools.partial(array, dtype=self.dtype, larger=larger)
        return {name: kind(name, shape, hard=hard) for name, shape in shapes.items()}

    def __call__(self, recipe: fp8.Recipe, state: Any, x: Any, w: Any, bias: Any = None) -> Any:
        if isinstance(self.call, str):
            return fp8.einsum(self.call, x, w, recipe=recipe, state=state)
        return fp8.dot_general(x, w, self.call, recipe=recipe, state=state, bias=bias)


_PLAIN = (((1,), (0,)), ((), ()))
# No side is a multiple of a tile. The shapes are few, because each costs compile time.
MATMULS = {
    "2D bfloat16": Matmul((200, 136), (136, 72), (200, 72), "bfloat16", _PLAIN, bias=(72,)),
    "2D float32, hard at step 2": Matmul(
        (200, 136), (136, 72), (200, 72), "float32", _PLAIN, hard_steps=(1,), bias=(72,)
    ),
    "2D float32, hard at step 1": Matmul(
        (200, 136), (136, 72), (200, 72), "float32", _PLAIN, hard_steps=(0,)
    ),
    "transposed": Matmul((136, 200), (72, 136), (200, 72), "bfloat16", (((0,), (1,)), ((), ()))),
    "bqhd,bkhd->bhqk": Matmul(
        (2, 40, 3, 72), (2, 33, 3, 72), (2, 3, 40, 33), "bfloat16", "bqhd,bkhd->bhqk"
    ),
    "two contracted axes": Matmul(
        (2, 36, 5, 8), (5, 8, 3, 12), (2, 36, 3, 12), "float32", (((2, 3), (0, 1)), ((), ()))
    ),
}
