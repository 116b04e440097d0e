"""Rows of cast statistics: all records of one copy of a tensor as one row."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxfp8._typing import Matmul, Tensor
from jaxfp8.diagnostics._names import layer_name
from jaxfp8.ops._cast_stats import CastStats

_SMALLEST_E8M0 = 2.0**-127  # subnormal in float32, so XLA may send 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastRow:
    """What the casts of one copy of a tensor lost, over all records of it.

    Here x is the tensor before a cast, s its scale, and `x ~ stored * s`.

    Attributes:
      layer: the name of the layer.
      tensor: "x", "w" or "g", the gradient of the layer's result.
      matmuls: the matmuls that read the copy: "fprop", "dgrad", "wgrad".
      amax: `max |x|`; inf if a value is not finite.
      scale_min: the smallest s; NaN if no s counts. An s does not count if all its values are zero,
        or if it is NaN. (With inf or NaN in its values, an E8M0 scale is NaN, and a float32 scale
        that is not stored is 1.)
      scale_max: the largest s.
      saturated: `count(|x| > L * s) / values`. L is the largest value of the format plus half of
        the spacing there: 464 for E4M3, 61440 for E5M2. Below L the clip loses no more than
        rounding does.
      underflowed: `count(x != 0 and stored == 0) / count(x != 0)`. A magnitude below 2^-126 counts
        as 0.
      nonfinite: the number of values that are inf or NaN.
      values: the number of values, summed over all records.
      calls: the number of records. Each call gives one on each device of a `jax.shard_map`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, recipe = jnp.array([[1e6, 1.0, 0.0]]), fp8.recipes.current()
      >>> with fp8.diagnostics.collect() as records:
      ...     _ = fp8.dot(x, jnp.ones((3, 2)), recipe=recipe, name="up")
      >>> row = fp8.diagnostics.summary(records).rows[0]
      >>> row.layer, row.tensor, row.amax, row.saturated, row.underflowed
      ('up', 'x', 1000000.0, 0.0, 0.5)
    """

    layer: str
    tensor: Tensor
    matmuls: tuple[Matmul, ...]
    key: str = dataclasses.field(repr=False)
    amax: float
    scale_min: float
    scale_max: float
    saturated: float
    underflowed: float
    nonfinite: int
    values: int
    calls: int


def cast_rows(records: Iterable[tuple[str, tuple[CastStats, ...]]]) -> list[CastRow]:
    """One row for each layer, tensor and copy, sorted by them.

    Example:
      >>> cast_rows([])
      []
    """
    found: dict[tuple[str, Tensor, tuple[Matmul, ...]], list[CastStats]] = {}
    for path, statistics in records:
        for each in statistics:
            key = layer_name(path.split("/")), each.tensor, each.matmuls
            found.setdefault(key, []).append(each)
    order = sorted(found, key=lambda key: (natural(key[0]), "xwg".index(key[1]), key[2]))
    return [_row(*key, found[key]) for key in order]


def _row(
    layer: str, tensor: Tensor, matmuls: tuple[Matmul, ...], records: list[CastStats]
) -> CastRow:
    def all_of(field: str) -> np.ndarray:
        return np.array([np.asarray(getattr(each, field), np.float64) for each in records])

    def total(field: str) -> int:
        return int(all_of(field).sum())

    values, nonzero = total("values"), total("nonzero")
    smallest, largest = float(all_of("scale_min").min()), float(all_of("scale_max").max())
    has_scale = largest >= 0
    return CastRow(
        layer=layer,
        tensor=tensor,
        matmuls=matmuls,
        # Two matmuls read each tensor.
        key=tensor if len(matmuls) == 2 else f"{tensor}/{matmuls[0]}",
        amax=float(all_of("amax").max()),
        scale_min=(smallest or _SMALLEST_E8M0) if has_scale else np.nan,
        scale_max=(largest or _SMALLEST_E8M0) if has_scale else np.nan,
        saturated=total("saturated") / max(values, 1),
        underflowed=total("underflowed") / max(nonzero, 1),
        nonfinite=total("nonfinite"),
        values=values,
        calls=len(records),
    )


def natural(name: str) -> list[Any]:
    """A key for sorting in which numbers are ordered by value: layer 2 before layer 10.

    Example:
      >>> sorted(["layers/10", "layers/2"], key=natural)
      ['layers/2', 'layers/10']
    """
    digits = "".join(c if c.isdigit() else f" {c} " for c in name).split()
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in digits]
