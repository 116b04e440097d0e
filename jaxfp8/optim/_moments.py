"""Moments of an optimizer, stored in short formats."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jax import lax

from jaxfp8._check import check_type
from jaxfp8._pytrees import register_node
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, PyTree
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.ops._quantize_params import path_name
from jaxfp8.optim._eight_bit_formats import ExpandedFP8State, Int8State, LinearInt8State
from jaxfp8.optim._masters import Float16State
from jaxfp8.optim._moment_formats import AbstractMomentFormat, PerParameter
from jaxfp8.optim._weights import is_float, widened
from jaxfp8.sharding._amax import manual_axes, types_show_varying, varying_axes
from jaxfp8.weights._quantized_weight import is_weight

# The nodes of an optimizer state that hold stored moments.

_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
# For each node the dtypes of its first array, by which it is told from parameters.
_STORED: dict[Any, tuple[Any, ...]] = {
    Int8State: (jnp.int8, jnp.uint8),
    LinearInt8State: (jnp.int8,),
    ExpandedFP8State: _FP8,
    Float16State: (jnp.float16,),
    QuantizedTensor: _FP8,
}


def is_stored_moment(node: Any) -> bool:
    """Whether a node is a moment that a format has stored. A bfloat16 array is no node."""
    return isinstance(node, tuple(_STORED))


def restore_moment_nodes(state: PyTree) -> PyTree:
    """A state whose moments are nodes again. `nnx.Optimizer.update` makes them `nnx.State`s."""
    return jax.tree.map(
        lambda node: _node_of(node) or node, state, is_leaf=lambda node: bool(_node_of(node))
    )


def _node_of(fields: Any) -> Any:
    """The stored moment with these fields, or None."""
    if not isinstance(fields, nnx.State):
        return None
    arrays: dict[Any, Any] = dict(fields)
    for kind, dtypes in _STORED.items():
        names = getattr(kind, "_fields", ("values", "scale"))
        if {*arrays} == {*names} and getattr(arrays[names[0]], "dtype", None) in dtypes:
            if kind is QuantizedTensor:
                return kind(**arrays, granularity=PerTensor(), dtype=jnp.dtype(jnp.float32))
            return kind(**arrays)
    return None


# `with_moment_formats`: an optax optimizer whose moments are stored in few bytes.

FIRST = {"mu", "trace"}  # optax's names of moments that can be negative
SECOND = {"nu", "nu_max", "sum_of_squares"}  # and of those that cannot


@register_node
class MomentFormatsState(NamedTuple):
    """The state of `with_moment_formats`.

    Example:
      >>> from jaxfp8.optim import Int8
      >>> tx = with_moment_formats(optax.trace(0.9), {"trace": Int8(min_size=0)})
      >>> tx.init({"w": jnp.ones(256)}).inner.trace["w"].roots.dtype.name
      'int8'
    """

    inner: optax.OptState  # of the wrapped optimizer, with stored moments
    seed: Array  # uint32 [], of stochastic rounding
    step: Array  # int32 [], updates so far


def with_moment_formats(
    tx: optax.GradientTransformation,
    formats: Mapping[str, AbstractMomentFormat | PerParameter],
    *,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that stores its moments in few bytes, and computes in float32.

    Each update reads the moments as float32, calls the wrapped optimizer with float32 gradients,
    and stores the new moments. It works with the optimizers of optax whose states hold moments in
    these fields: Adam, AdamW, Lion, Muon, Adagrad, momentum SGD.

    | format | bytes a value | second moment |
    |---|---|---|
    | `Float32()` | 4 | yes |
    | `BFloat16()` | 2 | yes |
    | `Float16()`, one scale a tensor | 2 | yes |
    | `FP8()`, one scale a tensor | 1 | refused |
    | `Int8()`, groups of 128 | 1.03 | yes |
    | `ExpandedFP8()`, groups of 128 | 1.06 | yes |

    Numbers and small arrays stay as they are (`min_size=` of a format). Gradients may be
    `QuantizedTensor`s, if no transformation such as clipping comes before.

    Args:
      tx: the wrapped optimizer.
      formats: how each field is stored. In optax's states "mu" is the first moment, and "trace" is
        momentum. "nu", "nu_max" (AMSGrad) and "sum_of_squares" (Adagrad) are second moments. Fields
        that are not named stay as they are. `PerParameter` chooses by the parameter's name.
      seed: of stochastic rounding. With different seeds the random bits differ.

    Returns:
      An optimizer. Updates are float32.

    Raises:
      TypeError: if a format is none. By `init`, for a weight in FP8.
      ValueError: if a format cannot store a second moment, or if a field is unknown. By `init`, if
        the state of `tx` has no such field, is that of centered RMSProp or SM3, or if a rule of a
        `PerParameter` matches no parameter. By `update`, if another format has stored the state.

    Example:
      >>> from jaxfp8.optim import FP8, Float16
      >>> formats = {"mu": FP8(), "nu": Float16()}  # FP8-LM
      >>> tx = with_moment_formats(optax.adam(1e-3), formats)
      >>> state = tx.init({"w": jnp.ones((64, 64))})
      >>> state.inner[0].mu["w"].values.dtype.name, state.inner[0].nu["w"].values.dtype.name
      ('float8_e4m3fn', 'float16')
    """
    for field, format in formats.items():
        for each in format.formats if isinstance(format, PerParameter) else (format,):
            _check_format(field, each)
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> MomentFormatsState:
        names: set[str] = set()

        def pack(field: str, name: str, x: Any, index: int) -> Any:
            names.add(name)
            format = _format_of(formats[field], name)
            if not _is_stored_by(format, x):
                return x
            x = jnp.asarray(x, jnp.float32)
            # A new moment is 0, which no rounding changes. So any key will do.
            key = jax.random.key(0) if format.is_stochastic else None
            return format.pack(x, None, signed=field in FIRST, key=key)

        _check_without_weights(params)
        wide = inner.init(_widened(params))
        state = _mapped(wide, formats, pack)
        _refuse_others(wide, {*formats})
        if missing := sorted({*formats} - _fields(wide)):
            raise ValueError(
                f"formats={dict(formats)!r}: the state of the optimizer has no field {missing}. "
                "optax names a first moment 'mu', a second moment 'nu' and momentum 'trace'."
            )
        for format in formats.values():
            if isinstance(format, PerParameter):
                format.check_used(names)
        return MomentFormatsState(state, _seed(seed), jnp.int32(0))

    def update(
        grads: PyTree, state: MomentFormatsState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, MomentFormatsState]:
        old: list[Any] = []

        def unpack(field: str, name: str, x: Any, index: int) -> Any:
            old.append(x)
            format = _format_of(formats[field], name)
            if is_stored_moment(x) or _is_stored_by(format, x):
                _check_stored(field, format, x)
                return format.unpack(x)
            return x

        loaded = _mapped(restore_moment_nodes(state.inner), formats, unpack)
        updates, new = inner.update(_widened(grads), loaded, params, **extra_args)
        base = jax.random.fold_in(jax.random.key(state.seed), state.step)

        def pack(field: str, name: str, x: Any, index: int) -> Any:
            format, before = _format_of(formats[field], name), old[index]
            if not is_stored_moment(before) and not _is_stored_by(format, before):
                return x
            x = x.astype(jnp.float32)
            key = _shard_key(jax.random.fold_in(base, index), x) if format.is_stochastic else None
            return format.pack(x, before, signed=field in FIRST, key=key, step=state.step)

        packed = _mapped(new, formats, pack)
        return updates, MomentFormatsState(packed, state.seed, optax.safe_increment(state.step))

    return optax.GradientTransformationExtraArgs(init, update)


def _mapped(
    state: PyTree, formats: Mapping[str, Any], one: Callable[[str, str, Any, int], Any]
) -> PyTree:
    """An optimizer state with `one(field, name, leaf, index)` for each leaf of the named fields."""
    count = itertools.count()

    def is_node(node: Any) -> bool:
        return not is_stored_moment(node) and bool({*getattr(node, "_fields", ())} & {*formats})

    def moments(field: str, tree: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: one(field, path_name(path), x, next(count)),
            tree,
            is_leaf=is_stored_moment,
        )

    def node(node: Any) -> Any:
        if not is_node(node):
            return node
        fields = [field for field in node._fields if field in formats]
        return node._replace(**{field: moments(field, getattr(node, field)) for field in fields})

    return jax.tree.map(node, state, is_leaf=is_node)


def _fields(state: PyTree) -> set[str]:
    """The names of all fields in an optimizer state, also of those without arrays."""
    found: set[str] = set()

    def look(node: Any) -> bool:
        found.update(getattr(node, "_fields", ()))
        return False

    jax.tree.leaves(state, is_leaf=look)
    return found


# States of optax whose fields have these names, and are other things: fields, and the reason.
_OTHERS: dict[type, tuple[set[str], str]] = {
    optax.ScaleByRStdDevState: (
        {"mu", "nu"},
        "centered RMSProp divides by the root of a difference of two moments. Rounded moments make "
        "it wrong, or NaN. Use optax.rmsprop(centered=False)",
    ),
    optax.ScaleBySM3State: (
        {"mu", "nu"},
        "in SM3 'mu' is a second moment of few values, and 'nu' is a momentum, whose sign would be "
        "lost. Use another optimizer, or optax.sm3 alone",
    ),
    optax.contrib.SophiaState: (
        {"nu"},
        "in Sophia 'nu' is a diagonal of the Hessian, which can be negative. Store 'mu' alone",
    ),
}


def _refuse_others(state: PyTree, fields: set[str]) -> None:
    """Raise ValueError if a field of an optimizer state is no moment of its name."""
    kinds = tuple(_OTHERS)
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds)):
        names, why = _OTHERS.get(type(node), (set(), ""))
        if names & fields:
            raise ValueError(f"formats of {sorted(names & fields)}: {why}.")


def _format_of(format: AbstractMomentFormat | PerParameter, name: str) -> AbstractMomentFormat:
    return format.of(name) if isinstance(format, PerParameter) else format


def _is_stored_by(format: AbstractMomentFormat, x: Any) -> bool:
    """Whether a format stores an array. Numbers and small arrays stay as they are."""
    large = is_float(x) and jnp.ndim(x) > 0 and jnp.size(x) > 0
    return large and _global_size(x) >= format.min_size


def _seed(seed: Any) -> Array:
    """A seed as uint32 []."""
    if isinstance(seed, int):
        return jnp.asarray(np.uint32(seed % 2**32))
    return jnp.asarray(seed).astype(jnp.uint32)


def _widened(tree: PyTree) -> PyTree:
    return jax.tree.map(widened, tree, is_leaf=lambda node: isinstance(node, QuantizedTensor))


def _shard_key(key: Array, x: Array) -> Array:
    """The key of an array. Inside `jax.shard_map` each shard has its own, and replicas have one."""
    if not manual_axes():
        return key
    if not types_show_varying():
        raise ValueError(
            f"rounding='stochastic' inside shard_map(check_vma=False) over {manual_axes()}: types "
            "do not distinguish shards from replicas, which must get the same random bits. Use "
            "check_vma=True."
        )
    axes = tuple(sorted(varying_axes(x)))
    return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key


def _check_format(field: str, format: Any) -> None:
    """Raise TypeError or ValueError unless a field can be stored so."""
    known = (
        "one of Float32(), BFloat16(), Float16(), FP8(), Int8(), ExpandedFP8() and "
        "PerParameter(rules, format)"
    )
    check_type(field, format, AbstractMomentFormat, known)
    reason = format.for_second_moment
    if field not in FIRST | SECOND:
        raise ValueError(
            f"{field}={format!r}: it is not known whether values of a field {field!r} can be "
            f"negative. Fields of first moments are {sorted(FIRST)}, those of second moments "
            f"{sorted(SECOND)}."
        )
    if field in SECOND and reason and not getattr(format, "force", False):
        raise ValueError(f"{field}={format!r} cannot store a second moment: {reason}.")
    if field in SECOND and not getattr(format, "companding", True):
        raise ValueError(
            f"{field}={format!r} cannot store a second moment: linear steps make zeros of its "
            "small values, and the update divides by their root. Use Int8(companding=True)."
        )


def _check_stored(field: str, format: AbstractMomentFormat, stored: Any) -> None:
    """Raise ValueError if another format has stored a moment."""
    if not format.reads(stored):
        arrays = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(stored))
        raise ValueError(
            f"{field}={format!r}, but the optimizer state holds {type(stored).__name__} "
            f"({arrays}), which another format has stored. Use the format with which the state was "
            "made, or call tx.init."
        )


def _check_without_weights(params: PyTree) -> None:
    """Raise TypeError if a parameter is a weight in FP8, whose moments no optimizer can add to."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight):
        if is_weight(leaf):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is {leaf}, which this optimizer cannot change."
                " Give it the master weights: with_master_weights(tx, master=...), and "
                "init_master_weights."
            )


def _global_size(x: Array) -> int:
    """The number of values of an array on all devices, over which it is split."""
    axes = varying_axes(x) if isinstance(x, jax.Array) else ()
    return math.prod(jnp.shape(x)) * math.prod(lax.axis_size(axis) for axis in axes)
