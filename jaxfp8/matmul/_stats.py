"""Statistics of casts and of sums, and the context that watches them."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._check import check_type
from jaxfp8._geometry import Geometry, OperandAxes
from jaxfp8._pytrees import STATIC, register_node
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Axes, Matmul, Tensor
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._exact import TINY, factors_of, times, widen
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._per_block import PerBlock, is_explicit
from jaxfp8.numerics._tensor_cores import PROMOTED, WGMMA_K, sums_of

# Statistics of one cast: how much of a tensor the format and its scales lose.

_EXACT = 2**31 - 1  # an int32 counts so far


@register_node
@dataclasses.dataclass(frozen=True)
class CastStats:
    """Statistics of one FP8 copy of a tensor x with the scale s, per value: `x ~ stored * s`.

    Counts are i32[], or f32[] if there are 2^31 values or more.
    """

    amax: Array  # f32[], `max |x|`; inf if a value is not finite
    scale_min: Array  # f32[], over cells with a nonzero value; inf if there is none
    scale_max: Array  # f32[], over the same cells; -inf if there is none
    saturated: Array  # finite values with `|x| > _limit(format) * s`
    underflowed: Array  # nonzero values whose stored value is 0
    nonzero: Array  # finite values with `|x| >= 2^-126`; smaller ones count as 0
    nonfinite: Array  # values that are inf or NaN
    tensor: Tensor = dataclasses.field(metadata=STATIC)
    matmuls: tuple[Matmul, ...] = dataclasses.field(metadata=STATIC)  # those that read the copy
    # How many there are, on this device inside `jax.shard_map`.
    values: int = dataclasses.field(metadata=STATIC)


def _limit(format: Format) -> float:
    """The magnitude above which the clip of a cast loses more than rounding does."""
    # The middle between the largest value and the next one, which the format lacks.
    return format.max + 2.0 ** (format.max_exponent - format.mantissa_bits - 1)


def cast_stats(
    x: Array, copy: QuantizedTensor, tensor: Tensor, matmuls: tuple[Matmul, ...]
) -> CastStats:
    """The statistics of `copy`, the copy of x [...] that these matmuls read."""
    size = widen(magnitude(x))
    finite = size < jnp.inf
    nonzero = finite & (size >= TINY)
    factors = factors_of(copy.scale)
    largest = times(jnp.full_like(factors[0], _limit(copy.format)), factors)
    saturated = finite & (size > copy.granularity.expand(largest, x.shape))
    without_sign = lax.bitcast_convert_type(copy.values, jnp.uint8) & 0x7F
    # Scales of cells without a nonzero value mean nothing. For float32 they are 1.
    scale = times(jnp.ones_like(factors[0]), factors)
    used = copy.granularity.maximum(jnp.where(nonzero, size, 0.0)) > 0
    used &= scale == scale  # an E8M0 scale of a cell with inf or NaN is NaN
    return CastStats(
        amax=jnp.max(size, initial=0.0),
        scale_min=jnp.min(jnp.where(used, scale, jnp.inf), initial=jnp.inf),
        scale_max=jnp.max(jnp.where(used, scale, -jnp.inf), initial=-jnp.inf),
        saturated=_count(saturated),
        underflowed=_count(nonzero & (without_sign == 0)),
        nonzero=_count(nonzero),
        nonfinite=_count(~finite),
        tensor=tensor,
        matmuls=matmuls,
        values=math.prod(x.shape),
    )


def _count(mask: Array) -> Array:
    dtype = jnp.int32 if math.prod(mask.shape) <= _EXACT else jnp.float32
    return jnp.sum(mask, dtype=dtype)


# Statistics of the sums of one matmul: how much Hopper's tensor cores would lose of them.
#
# The model of the tensor cores computes a sample of the result, with all of K. Every chip can do
# so.
#
# Letters: B batch, M N kept axes, K contracted axes; C steps of S values along K.

Accumulation: TypeAlias = Literal["fast", "promoted"]
# At most so many matrices of a batch, rows of lhs, and columns of rhs. With a batch, the rows of
# all its matrices count.
_BATCH, _ROWS = 8, 64


@register_node
@dataclasses.dataclass(frozen=True)
class SumStats:
    """Statistics of the sums of one matmul. All figures are f32[], 0 if all sums are."""

    one_sign: Array  # `sum |y| / sum of |products|`, over the outputs y of the sample
    fast: Array  # `|z - y| / |y|` in the Frobenius norm; z are sums never promoted. NaN for tiles
    promoted: Array  # the same of promoted sums
    matmuls: tuple[Matmul, ...] = dataclasses.field(metadata=STATIC)  # the one that adds
    # The length of a sum, on this device inside `jax.shard_map`.
    k: int = dataclasses.field(metadata=STATIC)
    outputs: int = dataclasses.field(metadata=STATIC)  # how many are in the sample
    in_use: Accumulation = dataclasses.field(metadata=STATIC)  # of this matmul


def sum_stats(
    matmul: Matmul, lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall
) -> SumStats:
    """The statistics of the sums of `call`. No operand is empty."""
    in_tiles = lhs.granularity.in_tiles or rhs.granularity.in_tiles
    geometry = call.geometry
    step = _step(lhs, rhs, geometry) if in_tiles else PROMOTED
    batch, rows, k = geometry.lhs.matrix_shape(lhs.shape)
    _, columns, _ = geometry.rhs.matrix_shape(rhs.shape)
    batch = min(batch, _BATCH)
    sizes = min(rows, _ROWS // batch), min(columns, _ROWS)
    values, scales = zip(
        *(
            _in_steps(*_sample(operand, axes, batch, size), step, in_tiles)
            for operand, axes, size in zip((lhs, rhs), geometry.sides, sizes, strict=True)
        ),
        strict=True,
    )
    one_sign, fast, promoted = _losses(*values, scales if in_tiles else None)
    return SumStats(
        one_sign=one_sign,
        fast=jnp.full_like(fast, jnp.nan) if in_tiles else fast,
        promoted=promoted,
        matmuls=(matmul,),
        k=k,
        outputs=batch * math.prod(sizes),
        in_use="fast" if call.fast_accumulation and not in_tiles else "promoted",
    )


def _step(lhs: QuantizedTensor, rhs: QuantizedTensor, geometry: Geometry) -> int:
    """S of operands in tiles. These are along the last contracted axis."""
    sides = [
        operand.granularity.along(operand.ndim)[axes.contracted[-1]]
        for operand, axes in zip((lhs, rhs), geometry.sides, strict=True)
        if operand.granularity.in_tiles
    ]
    return math.gcd(PROMOTED, *sides)


def _sample(
    operand: QuantizedTensor, axes: OperandAxes, batch: int, rows: int
) -> tuple[Array, Array]:
    """Values [B, M, contracted axes], evenly spaced, and the scale of each."""
    kept: dict[int, np.ndarray] = {}
    for names, count, axis in ((axes.batch, batch, 1), (axes.kept, rows, 0)):
        shape = tuple(operand.shape[name] for name in names)
        flat = np.linspace(0, math.prod(shape) - 1, count).round().astype(int)
        indices = np.unravel_index(flat, shape) if shape else ()
        kept |= {n: np.expand_dims(i, axis) for n, i in zip(names, indices, strict=True)}
    contracted = sorted(axes.contracted)
    order = 0, 1, *(2 + contracted.index(axis) for axis in axes.contracted)
    zero = np.zeros((1, 1), np.int32)

    def take(x: Array, sides: Axes) -> Array:
        index = [
            kept[axis] // sides[axis] * (size > 1) if axis in kept else slice(None)
            for axis, size in enumerate(x.shape)
        ]
        whole = jax.NamedSharding(jax.typeof(x).sharding.mesh, jax.P()) if is_explicit(x) else None
        # With an index in front, NumPy's rules put the axes of all indices there.
        rows = x[None].at[(zero, *index)].get(mode="promise_in_bounds", out_sharding=whole)
        return rows.transpose(order)

    sides = operand.granularity.along(operand.ndim)
    values = take(operand.values, (1,) * operand.ndim)
    scale = take(operand.scale.reshape(operand.scale.shape or (1,) * operand.ndim), sides)
    scale = times(jnp.ones(scale.shape, jnp.float32), factors_of(scale))
    inner = tuple(sides[axis] for axis in axes.contracted)
    if max(inner, default=1) > 1:
        scale = PerBlock((1, 1, *inner)).expand(scale, values.shape)
    scale = jnp.broadcast_to(scale, values.shape)
    # Without a contracted axis each sum has one product.
    return (values, scale) if inner else (values[..., None], scale[..., None])


def _in_steps(values: Array, scale: Array, step: int, in_tiles: bool) -> tuple[Array, Array]:
    """Values [B, M, C, S] with zeros to whole steps of the tensor cores, and scales [B, M, C]."""
    if not in_tiles:  # steps go on from one contracted axis to the next
        values = values.reshape(*values.shape[:2], -1)
    padded = _padded(values, step)
    padded = padded.reshape(*values.shape[:2], -1, step)
    return _padded(padded, WGMMA_K), scale[..., ::step].reshape(*values.shape[:2], -1)


def _padded(x: Array, multiple: int) -> Array:
    """x with zeros at the end of the last axis, whose size becomes a multiple."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)])


@jax.jit  # traced once for all matmuls whose samples have one shape
def _losses(lhs: Array, rhs: Array, scales: tuple[Array, Array] | None) -> tuple[Array, ...]:
    """`one_sign`, `fast` and `promoted` of `SumStats`, of samples [B, M, C, S] and [B, N, C, S]."""
    exact, size, promoted, fast = jax.vmap(sums_of)(lhs, rhs, scales)
    unit = jnp.max(jnp.abs(exact))  # so that no square leaves the range of float32

    def norm(x: Array) -> Array:
        return jnp.linalg.norm((_ratio(x, unit)).ravel())

    lost = [_ratio(norm(each - exact), norm(exact)) for each in (fast, promoted)]
    return _ratio(jnp.sum(jnp.abs(exact)), jnp.sum(size)), *lost


def _ratio(of: Array, to: Array) -> Array:
    return jnp.where(of == 0, 0.0, of / to)


# Whether the casts of matmuls are watched, and how their statistics reach the host.
#
# The switch is a context that JAX knows (`jax.make_user_context`). Every cache of JAX has it in its
# key: those of traces, of loops and of programs. So a step that was compiled before is compiled
# once more while casts are watched. The program without statistics is never changed, and is used
# again afterwards.
#
# Statistics are scalars, which `jax.debug.callback` sends. A matmul that is differentiated sends
# those of x, w and g together, in its backward pass. So `jax.checkpoint`, which runs a forward pass
# twice, does not send them twice.

Stats: TypeAlias = CastStats | SumStats
Receive = Callable[[str, tuple[Stats, ...]], None]  # of a layer; called on another thread


class Watched(NamedTuple):
    """What a matmul reports, and under which name."""

    layer: str
    sums: bool  # those of sums, too


# None, or whether statistics of sums are wanted besides those of casts.
_watched: Any = jax.make_user_context(None)
# A program outlives the context in which it was compiled. So it sends to whoever listens now, and
# finds the listener here. Callbacks run on another thread, where context variables have no value.
_listeners: list[Receive] = []
# Frames of these packages do not name a matmul.
_LIBRARIES = frozenset({"jaxfp8", "jax", "flax", "functools", "contextlib"})


@contextlib.contextmanager
def watch_casts(receive: Receive, *, sums: bool = False) -> Iterator[None]:
    """Watch the casts of all matmuls that run in this context, and their sums if they are wanted.

    Sums of grouped matmuls are not watched.
    """
    if _listeners:
        raise RuntimeError(
            "fp8.diagnostics.collect() is active already, in this thread or in another. Records "
            "have one receiver. Leave the first context before you enter the next one."
        )
    _listeners.append(receive)
    try:
        with _watched(sums):
            yield
    finally:
        try:
            # Programs may still run. What they send belongs to this context.
            jax.effects_barrier()
        finally:
            _listeners.clear()


def watched_call(given: str | None) -> Watched | None:
    """What a matmul reports. Its name is `name=` of the call, or the line of code that calls it."""
    check_type("name", given, str | None, "a string, for instance 'mlp/up'")
    sums = _watched.value
    if sums is None:
        return None  # equal layers share their traces, so no name is part of the call
    frames = [
        (str(frame.f_globals.get("__name__", "")), line, frame)
        for frame, line in traceback.walk_stack(None)
    ]
    for module, _, frame in frames:
        # `nn.scan` traces its body once only to check it. That trace must have no effect: with one,
        # flax 0.12.12 raises "broadcasted variable has a data dependency on the scan body". Only
        # this local variable says which trace it is. If flax renames it, users see flax's error.
        if module == "flax.core.axes_scan" and frame.f_locals.get("init_mode") is True:
            return None
    if given is not None:
        return Watched(given, sums)
    for module, line, frame in frames:
        if module.partition(".")[0] not in _LIBRARIES:
            return Watched(f"{pathlib.PurePath(frame.f_code.co_filename).name}:{line}", sums)
    return Watched("matmul", sums)


def send_stats(watched: Watched | None, statistics: tuple[Stats, ...]) -> None:
    """Send statistics of a layer to the host when the program runs."""
    if statistics:
        assert watched is not None
        jax.debug.callback(functools.partial(_deliver, watched.layer), statistics)


def _deliver(layer: str, statistics: tuple[Stats, ...]) -> None:
    for receive in _listeners:
        receive(layer, statistics)
