"""Moments in 8 bits: `FP8`, and formats whose scale belongs to a group of 128 values."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfp8._check import check_int
from jaxfp8._pytrees import register_node
from jaxfp8._quantized_tensor import Cast, Direction, QuantizedTensor
from jaxfp8._typing import Array, DType, Rounding
from jaxfp8.kernels.cast._api import KnownScale, cast_copies
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._exact import TINY, divide
from jaxfp8.numerics._formats import E4M3, Format, check_value_format
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._scale import ScaleRule
from jaxfp8.optim._masters import AbstractMaster, FP8State, MasterState
from jaxfp8.optim._moment_formats import (
    AbstractMomentFormat,
    MomentRounding,
    as_float,
    check_rounding,
    float_code_below,
    float_of,
    round_code,
    round_to_float_code,
    shared_axes,
    thresholds,
)
from jaxfp8.sharding._amax import manual_axes, pmax, types_show_varying, varying_axes

# Moments and master weights in FP8, with one scale for a tensor.

_SMALL = 4096  # arrays with fewer values stay in float32: norms and biases. They take few bytes


@dataclasses.dataclass(frozen=True)
class FP8(AbstractMaster, AbstractMomentFormat):
    """A first moment in FP8 with one float32 scale for a tensor: 1 byte a value.

    A master weight is refused, too. It loses updates below 2^-5 of a weight. FP8-LM found that
    training diverges (section 3.4).

    A second moment is refused. E4M3 holds magnitudes down to 2^-18 of the largest one, and the
    second moment is a square: where the gradient is below 2^-9 of the largest one, it becomes 0.
    The update divides by its root. FP8-LM found that training diverges (section 3.4).

    Attributes:
      format: E4M3 or E5M2.
      rounding: of a moment. "dithered", by thresholds that change at every step, or "stochastic",
        at random. A master weight is rounded to nearest.
      min_size: a smaller array stays in float32.
      force: True stores also a second moment and a master weight, for experiments.

    References:
      Peng et al., FP8-LM, arXiv:2310.18313, section 2.3.

    Example:
      >>> FP8().pack(jnp.array([1.0, -448.0]), None, signed=True, key=None).values.dtype.name
      'float8_e4m3fn'
    """

    format: Format = E4M3
    rounding: MomentRounding = "dithered"
    min_size: int = _SMALL
    force: bool = False
    state: ClassVar[type[MasterState]] = FP8State
    for_second_moment: ClassVar[str | None] = (
        "one scale for a tensor makes zeros of its small values, and the update divides by their "
        "root (FP8-LM, section 3.4). Use Float16(), Int8() or ExpandedFP8(), or FP8(force=True)"
    )

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_rounding(self.rounding)
        check_int("min_size", self.min_size, least=0)

    def pack(
        self, x: Array, old: Any, *, signed: bool, key: Array | None, step: Array | None = None
    ) -> QuantizedTensor:
        shared = shared_axes(self, x, None if old is None else old.scale)
        # One inf or NaN must not give the whole tensor the scale 1, under which small values are 0.
        finite = jnp.where(jnp.isfinite(x), x, 0)
        largest = pmax(amax(finite, PerTensor()), shared)
        known = KnownScale(*ScaleRule().apply(largest, self.format))
        if not (self.is_stochastic or step is None):
            return self._dithered(x, known, thresholds(step, x.shape))
        rounding: Rounding = "stochastic" if self.is_stochastic else "nearest"
        cast = Cast(format=self.format, directions=(Direction(PerTensor()),), rounding=rounding)
        ((stored,), _) = cast_copies(x, cast, (known,), key=key)
        return stored

    def _dithered(self, x: Array, known: KnownScale, u: Array) -> QuantizedTensor:
        format, magnitude = self.format, jnp.abs(x)
        zero = (magnitude - magnitude) * known.multiplier  # NaN if one of them is not finite
        # A magnitude below 2^-126 counts as 0, as in every cast.
        n = jnp.where(magnitude < TINY, 0, magnitude) * known.multiplier
        n = jnp.minimum(n, format.max)
        code = jnp.where(zero == zero, round_to_float_code(n, format.dtype, u), format.nan_byte)
        values = as_float(jnp.where(x < 0, code | 0x80, code), format.dtype)
        return QuantizedTensor(values, known.scale, PerTensor(), jnp.dtype(jnp.float32))

    def unpack(self, stored: QuantizedTensor) -> Array:
        return stored.dequantize(jnp.float32)

    def reads(self, stored: Any) -> bool:
        return isinstance(stored, QuantizedTensor) and stored.values.dtype == self.format.dtype

    def store(
        self, master: Array, weight_dtype: DType | None, old: Any = None
    ) -> tuple[FP8State, Array]:
        stored = self.pack(master, old, signed=True, key=None)
        return FP8State(stored.values, stored.scale), self.unpack(stored)

    def load(self, stored: FP8State, weight: Any) -> Array:
        values, scale = map(jnp.asarray, stored)
        tensor = QuantizedTensor(values, scale, PerTensor(), jnp.dtype(jnp.float32))
        return self.unpack(tensor)

    def check_master(self) -> None:
        if not self.force:
            raise ValueError(
                f"master={self!r} loses updates below 2^-5 of a weight. FP8-LM found that training "
                "diverges (section 3.4). Use BFloat16Plus(bits=8), or FP8(force=True) for "
                "experiments."
            )
        if self.is_stochastic:
            raise ValueError(
                f"master={self!r}: master weights have no key, and are rounded to nearest. Leave "
                "rounding= out."
            )


# Moments in 8 bits with a scale for each group of values: companded integers, and expanded FP8.
#
# A group is `group` neighbours along the last axis of the global array. So the stored bits do not
# depend on the mesh.

# The largest value of E4M3 over its third one above 0. The smallest value of a group becomes this
# third one. With the second or the fourth one rms errors are within 9 % of these, some larger, some
# smaller (the groups of benchmarks/optimizers/moment_accuracy.py).
_RANGE = E4M3.max / (3 * 2.0 ** (E4M3.min_exponent - E4M3.mantissa_bits))
# Products, because XLA makes one of a quotient by a constant. Their results at the ends are 1.
_LAST, _LAST_2, _LAST_4 = (float(np.float32(1) / np.float32(x)) for x in (127, 127**2, 255.0**4))
LEAST_ROOT = 2  # of a second moment above 0
_LEAST_POWER = 0.125  # of an expansion. With it a group can span the whole range of float32
# Of a group. Less would gain nothing: float32 rounds the logarithm. Its power is 11,520.
_LEAST_SPREAD = 1 + 2.0**-10


@register_node
class Int8State(NamedTuple):
    """A moment as roots in 8-bit integers."""

    roots: Array  # int8 [...], square roots of a first moment; uint8 [...], 4th roots of a second
    largest: Array  # float32, the largest magnitude of each group


@register_node
class LinearInt8State(NamedTuple):
    """A first moment in 8-bit integers, without companding."""

    codes: Array  # int8 [...]
    largest: Array  # float32, the largest magnitude of each group


@register_node
class ExpandedFP8State(NamedTuple):
    """A moment as `sign * (|values| / 448) ** (1 / power) * largest`."""

    values: Array  # float8_e4m3fn [...]
    largest: Array  # float32, the largest magnitude of each group
    power: Array  # float32, of each group


@dataclasses.dataclass(frozen=True)
class Int8(AbstractMomentFormat):
    """A moment in 8-bit integers, with a float32 scale for each group: 1 + 4/128 bytes a value.

    With companding, a first moment is stored as the square root of its magnitude, with its sign, in
    127 steps. Magnitude and root are relative to the largest magnitude of the group. A second
    moment is stored as its fourth root, in 255 steps. One above 0 is stored as 2 steps at least,
    because the update divides by its square root. The smallest first moment, and the smallest
    square root of a second one, are both 2^-14 of the largest in their group. So noise of a first
    moment makes no large update.

    Attributes:
      group: how many values share a scale.
      companding: False stores the first moment itself, in 127 steps. It cannot store a second one.
        8-bit Muon does so.
      min_size: a smaller array stays in float32.

    References:
      FlashOptim, arXiv:2602.23349 (companding, by other functions: `2n / (1 + n)` and `sqrt(n)`).
      8-bit Muon, arXiv:2509.23106 (linear).

    Example:
      >>> Int8(group=2).pack(jnp.array([1.0, -0.25]), None, signed=True, key=None).roots
      Array([127, -63], dtype=int8)
    """

    group: int = 128
    companding: bool = True
    min_size: int = _SMALL

    def __post_init__(self) -> None:
        check_int("group", self.group, least=2)
        check_int("min_size", self.min_size, least=0)

    def pack(
        self, x: Array, old: Any, *, signed: bool, key: Array | None, step: Array | None = None
    ) -> Int8State | LinearInt8State:
        tile = _tile_of(x, self.group)
        largest, n = _relative(x, tile)
        if signed:
            below = 127 * (jnp.sqrt(n) if self.companding else n)
        else:
            below = 255 * jnp.sqrt(jnp.sqrt(n))

        def value_of(code: Array) -> Array:
            power, last = self._power(code.astype(jnp.float32), signed=signed)
            return power * last

        code = round_code(n, below.astype(jnp.int32), value_of, thresholds(step, x.shape))
        if not signed:
            code = jnp.where(n > 0, jnp.maximum(code, LEAST_ROOT), 0)
            return Int8State(code.astype(jnp.uint8), largest)
        state = Int8State if self.companding else LinearInt8State
        return state(jnp.where(x < 0, -code, code).astype(jnp.int8), largest)

    def unpack(self, stored: Int8State | LinearInt8State) -> Array:
        codes, largest = stored
        power, last = self._power(codes.astype(jnp.float32), signed=codes.dtype == jnp.int8)
        # The value of one step is computed for each group. A product of a constant with each value
        # would be reordered by XLA if a row has one group, and then its bits depend on the mesh.
        x = power * _tile_of(codes, self.group).expand(largest * last, codes.shape)
        return jnp.where(codes < 0, -jnp.abs(x), x)

    def reads(self, stored: Any) -> bool:
        kind = Int8State if self.companding else LinearInt8State
        return isinstance(stored, kind) and _has_groups(stored.largest, stored[0], self.group)

    def _power(self, code: Array, *, signed: bool) -> tuple[Array, float]:
        """A power of codes, float32 [...], and the inverse of that of the last code."""
        if not self.companding:
            return code, _LAST
        square = code * code
        return (square, _LAST_2) if signed else (square * square, _LAST_4)


@dataclasses.dataclass(frozen=True)
class ExpandedFP8(AbstractMomentFormat):
    """A moment in E4M3 with dynamic range expansion: 1 + 8/128 bytes a value.

    Each group of 128 values is raised to a power that makes its range that of E4M3. A power above 1
    makes the steps of FP8 finer, and one below 1 makes room for a wide group. A second moment above
    0 is stored as the smallest FP8 number at least, because the update divides by its root.

    COAT stores 12 bytes a group, 2.19 bytes for both moments. Here they are 8 bytes, 2.13 in all,
    because values are relative to the largest one, and not to a center. Zeros have no effect on the
    power here.

    Attributes:
      group: how many values share a scale and a power.
      min_size: a smaller array stays in float32.

    References:
      Xi et al., COAT, arXiv:2410.19313, section 4.

    Example:
      >>> stored = ExpandedFP8().pack(jnp.array([1.0, -0.5]), None, signed=True, key=None)
      >>> stored.power, stored.values
      (Array([16.222393], dtype=float32), Array([448, -0.00585938], dtype=float8_e4m3fn))
    """

    group: int = 128
    min_size: int = _SMALL

    def __post_init__(self) -> None:
        check_int("group", self.group, least=2)
        check_int("min_size", self.min_size, least=0)

    def pack(
        self, x: Array, old: Any, *, signed: bool, key: Array | None, step: Array | None = None
    ) -> ExpandedFP8State:
        tile = _tile_of(x, self.group)
        largest, n = _relative(x, tile)
        # The largest inverse is the inverse of the smallest value above 0.
        spread = tile.maximum(jnp.where(n > 0, 1 / n, 1))
        power = float(np.log(_RANGE)) / jnp.log(jnp.maximum(spread, _LEAST_SPREAD))
        power = jnp.maximum(power, _LEAST_POWER)
        each, inverse = (tile.expand(p, x.shape) for p in (power, 1 / power))
        raised = jnp.minimum(jnp.exp(each * jnp.log(n)) * E4M3.max, E4M3.max)

        def value_of(code: Array) -> Array:
            return _root(float_of(code, E4M3.dtype), inverse)

        code = round_code(
            n, float_code_below(raised, E4M3.dtype), value_of, thresholds(step, x.shape)
        )
        if not signed:
            code = jnp.where(n > 0, jnp.maximum(code, 1), 0)
        values = as_float(jnp.where(x < 0, code | 0x80, code), E4M3.dtype)
        return ExpandedFP8State(values, largest, power)

    def unpack(self, stored: ExpandedFP8State) -> Array:
        values, largest, power = stored
        tile, shape = _tile_of(values, self.group), values.shape
        x = values.astype(jnp.float32)
        n = _root(jnp.abs(x), tile.expand(1 / power, shape)) * tile.expand(largest, shape)
        return jnp.where(x < 0, -n, n)

    def reads(self, stored: Any) -> bool:
        return isinstance(stored, ExpandedFP8State) and _has_groups(
            stored.largest, stored[0], self.group
        )


def _root(raised: Array, inverse: Array) -> Array:
    """What a magnitude in E4M3 stands for, relative to the largest of its group."""
    # `log2` would be a product with a constant, which XLA moves to the inverse if a row has one
    # group. Bits would then depend on the mesh.
    return jnp.exp(jnp.log(raised / E4M3.max) * inverse)


def _tile_of(x: Array, group: int) -> PerBlock:
    """The groups of an array. ValueError if a shard inside `jax.shard_map` may have cut one."""
    size = x.shape[-1] if x.ndim else 1
    if manual_axes() and size % group and (not types_show_varying() or varying_axes(x)):
        raise ValueError(
            f"group={group} does not divide the last axis of a shard {list(x.shape)} inside "
            f"shard_map over {manual_axes()}, so a group may have values on several devices. Use a "
            "group that divides it, or update the moments outside of shard_map."
        )
    return PerBlock((group,))


def _has_groups(of_groups: Array, values: Array, group: int) -> bool:
    """Whether an array has one value for each group of other values."""
    return of_groups.shape == PerBlock((group,)).scale_shape(values.shape)


def _relative(x: Array, tile: PerBlock) -> tuple[Array, Array]:
    """The largest magnitude of each group, NaN if it is not finite, and `|x|` relative to it."""
    largest = amax(x, tile)
    largest = jnp.where(largest >= TINY, largest, 0)
    finite = largest < jnp.inf
    # A product, because XLA makes one of a quotient by a repeated value, with other bits. One
    # division a group is correctly rounded, and its quotient is a normal number.
    smaller = jnp.where(largest > 1, 0.25, 1).astype(jnp.float32)
    inverse = divide(1.0, jnp.where(finite & (largest > 0), largest * smaller, 1))
    magnitude = jnp.abs(x)
    n = magnitude * tile.expand(smaller, x.shape) * tile.expand(inverse, x.shape)
    n = jnp.where((magnitude >= TINY) & tile.expand(finite, x.shape), jnp.minimum(n, 1), 0)
    return jnp.where(finite, largest, jnp.nan), n
