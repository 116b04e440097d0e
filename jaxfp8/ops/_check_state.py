"""`check_state`: a restored state is checked before a step believes it."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import PyTree
from jaxfp8.ops._identity import layout, same_fingerprint
from jaxfp8.ops._state import LEAVES, MatmulState, fingerprints, is_state, unset_state
from jaxfp8.quantizers._delayed_faults import Fault, faults

_SHOWN = 10  # faults that a message lists


def check_state(state: PyTree, like: PyTree, *, repair: bool = False) -> PyTree:
    """The state, if it can be one of this model's: for what Orbax, npz or any other file gave back.

    Four things are checked: the tree; shapes and dtypes; the fingerprint of each row, which finds a
    state of another format, margin, algorithm or tensor; and values. A scale must be unset, or the one
    that the amaxes of its history ask for. A history must be finite and not negative.

    Two edits of a file pass, because a step can leave the same. The first is a history whose scale
    was changed with it. The second is a scale up to 2^20 above what a full history asks for: an
    entry that large may just have left it. Both last until the next commit.

    Args:
      state: what was restored: a tree of states, or of dicts of their arrays, as a file that is read
        without a target gives them.
      like: a fresh state tree of the model, from `fp8.init_state` or the model's `init`, or its types
        (`jax.eval_shape`). Its layers may have different recipes.
      repair: unset the bad rows, and warn which. The next step takes the current amaxes of their
        tensors, as a first step does. A state whose arrays have other shapes is unset as a whole.

    Returns:
      The tree of `like` with the arrays of `state`.

    Raises:
      FP8StateError: naming each array, its value and the cure. For trees that differ, also with
        `repair=True`.

    Warns:
      UserWarning: with `repair=True`, listing what was unset.

    Example:
      >>> import jaxfp8 as fp8
      >>> like = fp8.init_state(fp8.recipes.delayed())
      >>> saved = {"scale": [0, 0, float("nan")], "amax_history": like.amax_history,
      ...          "nonfinite_steps": like.nonfinite_steps, "fingerprint": like.fingerprint}
      >>> fp8.check_state(saved, like)
      Traceback (most recent call last):
      ...
      jaxfp8._errors.FP8StateError: 1 fault in the quantizer state: ...
    """
    structure: Any
    places, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_state)
    try:
        parts = structure.flatten_up_to(state)
    except ValueError as error:
        raise FP8StateError(
            f"state has another tree than like: {error}. Restore it into the tree of like, or pass the like of the "
            "model that was saved."
        ) from None
    checked, found = [], []
    for (path, expected), part in zip(places, parts, strict=True):
        if not is_state(expected):
            raise FP8StateError(
                f"like holds a {type(expected).__name__} at {_at(path)}, where quantizer state is due; pass the state "
                "alone, without parameters."
            )
        arrays = _arrays(part, expected, path)
        wrong = list(_faults(part, arrays, expected))
        found += [_described(_at(path), arrays, expected, fault) for fault in wrong]
        frozen = part.frozen if isinstance(part, MatmulState) else expected.frozen
        checked.append(dataclasses.replace(_mended(arrays, expected, wrong), frozen=frozen))
    if found:
        text = f"{len(found)} fault{'s' * (len(found) > 1)} in the quantizer state:\n" + "\n".join(found[:_SHOWN])
        text += "\n..." if len(found) > _SHOWN else ""
        if not repair:
            raise FP8StateError(
                f"{text}\nRestore another checkpoint; or call fp8.check_state(state, like, repair=True) on what was "
                "read (flax: flax.serialization.msgpack_restore reads without a target), which unsets these rows."
            )
        warnings.warn(f"{text}\nThese rows were unset (repair=True).", stacklevel=2)
    return jax.tree.unflatten(structure, checked)


def _at(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path) or "the state"


def _arrays(part: Any, expected: MatmulState, path: tuple[Any, ...]) -> dict[str, Any]:
    """The arrays of what was restored in the place of a state."""
    if isinstance(part, MatmulState):
        arrays = {name: getattr(part, name) for name in LEAVES}
    elif isinstance(part, Mapping):
        arrays = {name: leaf for name, leaf in part.items() if leaf is not None}  # Orbax keeps the absent probe
    else:
        raise FP8StateError(
            f"state holds a {type(part).__name__} at {_at(path)}, where quantizer state is due: a MatmulState, or a "
            f"dict of its arrays {list(LEAVES)}."
        )
    if unknown := sorted(set(arrays) - set(LEAVES)):
        raise FP8StateError(f"state holds {unknown} at {_at(path)}; a saved state has the arrays {list(LEAVES)}.")
    for name, leaf in arrays.items():
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            raise FP8StateError(
                f"{_at(path)}.{name} is {leaf}, whose values cannot be read; call check_state on arrays, outside of "
                "jit, before the first step."
            )
    return {name: leaf if hasattr(leaf, "dtype") else np.asarray(leaf, np.float32) for name, leaf in arrays.items()}


def _host(leaf: Any) -> np.ndarray:
    """The values of an array, which may lie on the devices of several processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


def _faults(part: Any, arrays: dict[str, Any], expected: MatmulState) -> Iterator[Fault]:
    """What is wrong with a state: with all its rows, or with those that are named."""
    everywhere = np.ones(expected.scale.shape, bool)
    for name, shape in layout(expected).items():
        if name not in arrays:
            yield Fault(name, everywhere, "it is missing: the file has been written by another program or version")
        elif arrays[name].shape != shape:
            why = f"its shape must be {list(shape)}: another number of layers, rows, or another history_length"
            yield Fault(name, everywhere, why)
        elif arrays[name].dtype != jnp.float32:
            yield Fault(name, everywhere, f"its dtype is {arrays[name].dtype}, it must be float32")
        else:
            continue
        return
    if isinstance(part, MatmulState) and part.rows != expected.rows:
        yield Fault("rows", everywhere, f"its rows are {part.rows}")
        return
    host = {name: _host(leaf) for name, leaf in arrays.items()}
    foreign = ~same_fingerprint(host["fingerprint"], fingerprints(expected.rows, expected.scale.shape))
    yield from _any(Fault("fingerprint", foreign, "the row was saved for another tensor or quantizer"))
    for r, row in enumerate(expected.rows):
        here = np.arange(len(expected.rows)) == r
        scale, nonfinite_steps = host["scale"][..., r], host["nonfinite_steps"][..., r]
        for fault in faults(row.quantizer, scale, host["amax_history"][..., r, :], nonfinite_steps):
            rows = (fault.rows[..., None] & here) & ~foreign
            yield from _any(fault._replace(rows=rows))


def _any(fault: Fault) -> Iterator[Fault]:
    if fault.rows.any():
        yield fault


def _described(place: str, arrays: dict[str, Any], expected: MatmulState, fault: Fault) -> str:
    """A line of the message: where, which value, what is wrong with it, and whose it is."""
    indices = np.argwhere(fault.rows)
    row = expected.rows[indices[0][-1] if len(indices) else 0]
    whose = f"the model has {row.tensor} by {row.quantizer}" + f", and {len(indices) - 1} more rows" * (
        len(indices) > 1
    )
    if fault.leaf not in arrays:
        return f"  {place}.{fault.leaf}: {fault.what} ({whose})"
    value = _host(arrays[fault.leaf])
    if value.shape != layout(expected)[fault.leaf] or not len(indices):
        return f"  {place}.{fault.leaf} has shape {list(value.shape)}: {fault.what} ({whose})"
    shown = np.array2string(value[tuple(indices[0])], threshold=6, max_line_width=10_000)
    return f"  {place}.{fault.leaf}{indices[0].tolist()} = {shown}: {fault.what} ({whose})"


def _mended(arrays: dict[str, Any], expected: MatmulState, wrong: list[Fault]) -> MatmulState:
    """The state with its bad rows unset; as it is if there are none."""
    if not wrong:
        return dataclasses.replace(expected, **arrays)
    bad = np.any([fault.rows for fault in wrong], axis=0)
    unset = unset_state(expected.rows, expected.scale.shape[:-1])

    def one(name: str) -> Any:
        fresh, given = np.asarray(getattr(unset, name)), arrays.get(name)
        if given is None or given.shape != fresh.shape or given.dtype != fresh.dtype:
            return _placed(fresh, getattr(expected, name))
        where = bad[..., None] if name == "amax_history" else bad
        return _placed(np.where(where, fresh, _host(given)), given)

    return dataclasses.replace(expected, **{name: one(name) for name in LEAVES})


def _placed(values: np.ndarray, like: Any) -> Any:
    """The values where `like` lies."""
    sharding = getattr(like, "sharding", None)
    return jnp.asarray(values) if sharding is None else jax.device_put(values, sharding)
