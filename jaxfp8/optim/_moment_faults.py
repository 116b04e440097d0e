"""Values of a stored moment or master weight that no run makes, and those of a run that diverged.

All functions compute with NumPy, on the host.
"""

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8.numerics._exact import LARGEST, TINY
from jaxfp8.numerics._formats import format_of
from jaxfp8.optim._grouped_formats import (
    LEAST_ROOT,
    ExpandedFP8State,
    Int8State,
    LinearInt8State,
)
from jaxfp8.optim._masters import BFloat16PlusState, Float16State, FP8State
from jaxfp8.optim._moments import FIRST, SECOND

_DIVERGED = "it must be finite: training had diverged before the save, or the file is damaged"
_LEAST_FLOAT16 = 0x77FF  # the bits of 32752, half of the largest float16


class Fault(NamedTuple):
    """A fault of some values. There may be none."""

    array: str
    where: np.ndarray  # bool, like the array
    what: str


def value_faults(kind: Any, field: str, host: dict[str, np.ndarray]) -> Iterator[Fault]:
    """Values that no run makes, and those of a run that diverged."""
    second, values = field in SECOND, host.get("values")
    if kind in (Int8State, LinearInt8State):
        name = "roots" if kind is Int8State else "codes"
        codes = host[name]
        yield Fault(name, codes == -128, "codes are -127 to 127")
        if codes.dtype == np.uint8:
            small = (codes > 0) & (codes < LEAST_ROOT)
            yield Fault(name, small, f"a second moment above 0 has a root of {LEAST_ROOT} or more")
        # The rounding of the largest value may end one code below the last one.
        near = 254 if codes.dtype == np.uint8 else 126
        yield from _group_faults(np.abs(codes).view(np.uint8), near, host["largest"])
    elif kind is ExpandedFP8State:
        assert values is not None
        magnitude, last = yield from _float_faults(values, second)
        power = host["power"]
        yield Fault("power", ~((power >= 0.125) & (power < 11_521)), "powers are 1/8 to 11,520")
        yield from _group_faults(magnitude, last - 1, host["largest"])
    elif kind in (QuantizedTensor, FP8State):
        assert values is not None
        magnitude, last = yield from _float_faults(values, second)
        # The scale is the inverse of a rounded quotient.
        most = LARGEST / format_of(values.dtype).max * (1 + 1e-6)
        yield from _tensor_faults(magnitude, last - 1, host["scale"], most)
    elif kind is Float16State:
        assert values is not None
        magnitude, _ = yield from _float_faults(values, second)
        scale = host["scale"]
        mantissa = np.frexp(np.where(np.isfinite(scale), scale, 1))[0]
        yield Fault("scale", np.abs(mantissa) != 0.5, "it must be a power of two")
        yield from _tensor_faults(magnitude, _LEAST_FLOAT16, scale, 2.0**113)
    elif kind is BFloat16PlusState:
        if "high" in host:
            yield Fault("high", ~np.isfinite(_joined(host["high"], host["low"])), _DIVERGED)
    else:
        yield from _plain_faults(field, host)


def _plain_faults(field: str, host: dict[str, np.ndarray]) -> Iterator[Fault]:
    """Of arrays that no format has packed."""
    for name, x in host.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x if x.dtype.itemsize > 2 else x.astype(np.float32)
            if field in FIRST | SECOND | {"masters"}:
                yield Fault(name, ~np.isfinite(x), _DIVERGED)
            else:  # optax has inf in some states, such as the best loss so far
                yield Fault(name, np.isnan(x), _DIVERGED)
            if field in SECOND:
                yield Fault(name, x < 0, "a second moment is not negative")
        elif any(word in field for word in ("count", "step", "notfinite")):
            yield Fault(name, x < 0, "it counts, so it is not negative")


def _float_faults(
    values: np.ndarray, second: bool
) -> Generator[Fault, None, tuple[np.ndarray, int]]:
    """Of packed floats. Returns their magnitudes as codes, and the last finite code."""
    bits = values.view(f"uint{8 * values.dtype.itemsize}")
    last = int(jnp.finfo(values.dtype).max.view(bits.dtype))
    magnitude = bits & ((1 << (8 * values.dtype.itemsize - 1)) - 1)
    yield Fault("values", magnitude > last, _DIVERGED)
    if second:
        negative = (bits != magnitude) & (magnitude > 0)
        yield Fault("values", negative, "a second moment is not negative")
    return magnitude, last


def _group_faults(magnitude: np.ndarray, near: int, largest: np.ndarray) -> Iterator[Fault]:
    """Of codes [..., C] beside the largest magnitude of each group [..., G].

    Args:
      magnitude: of the codes.
      near: the least code that the largest value of a group can have.
      largest: 0 where all codes are 0.
    """
    normal = np.isfinite(largest) & (largest >= TINY)
    diverged = "it must be finite. One inf or NaN in a gradient makes NaN of a whole group: "
    yield Fault("largest", ~np.isfinite(largest), diverged + "training diverged before the save")
    low = np.isfinite(largest) & ~normal & (largest != 0)
    yield Fault("largest", low, "it must be 0 or a normal positive number (2^-126 or more)")
    wrong = []
    # The size of a group is not stored. A few sizes give the same number of groups.
    for size in _group_sizes(magnitude.shape[-1], largest.shape[-1]):
        tops = _tops(magnitude, size, largest.shape[-1])
        wrong.append((normal & (tops < near), (largest == 0) & (tops > 0)))
        if not np.any(wrong[-1]):
            break
    missing, some = wrong[-1] if not np.any(wrong[-1]) else wrong[0]
    yield Fault("largest", missing, f"a code of its group must be {near} or more in magnitude")
    yield Fault("largest", some, "it is 0, so all codes of its group must be 0")


def _group_sizes(size: int, groups: int) -> list[int]:
    """All sizes of groups that cut `size` values into so many groups, the likely ones first."""
    most = size if groups == 1 else (size - 1) // (groups - 1)
    least = size if groups == 1 else -(-size // groups)
    return sorted(range(least, most + 1), key=lambda n: (n != 128, n & (n - 1) != 0, n))


def _tops(magnitude: np.ndarray, size: int, groups: int) -> np.ndarray:
    """The largest code of each group [..., G]. The last group may be shorter."""
    if missing := size * groups - magnitude.shape[-1]:
        magnitude = np.pad(magnitude, [(0, 0)] * (magnitude.ndim - 1) + [(0, missing)])
    return magnitude.reshape(*magnitude.shape[:-1], groups, size).max(-1)


def _tensor_faults(
    magnitude: np.ndarray, near: int, scale: np.ndarray, most: float
) -> Iterator[Fault]:
    """Of codes [..., *axes] beside the scale of each tensor [...].

    Args:
      magnitude: of the codes.
      near: the least code that the largest value of a tensor can have.
      scale: 2^-126 or more. It is 1 where all codes are 0.
      most: the largest scale.
    """
    yield Fault("scale", ~np.isfinite(scale), _DIVERGED)
    low = np.isfinite(scale) & ((scale < TINY) | (scale > most))
    yield Fault("scale", low, f"scales are 2^-126 to {most:.3g}")
    top = magnitude.max(tuple(range(scale.ndim, magnitude.ndim)))
    # The smallest scale is that of all smaller values, too.
    free = (scale <= TINY) | ~np.isfinite(scale) | (scale > most)
    yield Fault("scale", ~free & (top == 0) & (scale != 1), "it must be 1, as all values are 0")
    lost = ~free & (top > 0) & (top < near)
    yield Fault("scale", lost, "it is too large for its values: none is near the largest code")


def _joined(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """`joined` of `_bfloat16_bits`, in NumPy."""
    wide = low.astype(np.uint32) << (8 if low.dtype == np.uint8 else 0)
    top = high.view(np.uint16).astype(np.uint32)
    return (((top - (wide >> 15)) << 16) | wide).view(np.float32)
