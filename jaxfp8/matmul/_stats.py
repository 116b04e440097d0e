"""Statistics of casts, and the context that watches them."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._check import check_type
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Matmul, Tensor
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._exact import TINY, factors_of, times, widen
from jaxfp8.numerics._formats import Format

# Statistics of one cast: how much of a tensor the format and its scales lose.

_EXACT = 2**31 - 1  # an int32 counts so far


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "amax", "scale_min", "scale_max", "saturated", "underflowed", "nonzero", "nonfinite",
    ],
    meta_fields=["tensor", "matmuls", "values"],
)  # fmt: skip
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
    tensor: Tensor
    matmuls: tuple[Matmul, ...]  # those that read the copy
    values: int  # how many there are, on this device inside `jax.shard_map`


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

Receive = Callable[[str, tuple[CastStats, ...]], None]  # of a layer; called on another thread

_watched: Any = jax.make_user_context(False)
# A program outlives the context in which it was compiled. So it sends to whoever listens now, and
# finds the listener here. Callbacks run on another thread, where context variables have no value.
_listeners: list[Receive] = []
# Frames of these packages do not name a matmul.
_LIBRARIES = frozenset({"jaxfp8", "jax", "flax", "functools", "contextlib"})


@contextlib.contextmanager
def watch_casts(receive: Receive) -> Iterator[None]:
    """Watch the casts of all matmuls that run in this context."""
    if _listeners:
        raise RuntimeError(
            "fp8.diagnostics.collect() is active already, in this thread or in another. Records "
            "have one receiver. Leave the first context before you enter the next one."
        )
    _listeners.append(receive)
    try:
        with _watched(True):
            yield
    finally:
        try:
            # Programs may still run. What they send belongs to this context.
            jax.effects_barrier()
        finally:
            _listeners.clear()


def name_of_call(given: str | None) -> str | None:
    """The name of a matmul: `name=` of the call, or the line of code that calls it."""
    check_type("name", given, str | None, "a string, for instance 'mlp/up'")
    if not _watched.value:
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
        return given
    for module, line, frame in frames:
        if module.partition(".")[0] not in _LIBRARIES:
            return f"{pathlib.PurePath(frame.f_code.co_filename).name}:{line}"
    return "matmul"


def send_stats(layer: str | None, statistics: tuple[CastStats, ...]) -> None:
    """Send statistics of a layer to the host when the program runs."""
    if statistics:
        assert layer is not None
        jax.debug.callback(functools.partial(_deliver, layer), statistics)


def _deliver(layer: str, statistics: tuple[CastStats, ...]) -> None:
    for receive in _listeners:
        receive(layer, statistics)
