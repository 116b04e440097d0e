"""`check_state`: the check of a restored state before a step uses it."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.quantizers._base import Fault, RowState
from jaxfp8.state._check_weights import Place, check_weights, on_host
from jaxfp8.state._commit import scales_are_set
from jaxfp8.state._identity import explain_fingerprint, state_shapes, tag_fits
from jaxfp8.state._init import fingerprints, same_rows, unset_state
from jaxfp8.state._saved import Path, listed, names_of
from jaxfp8.state._state import LEAVES, MatmulState, is_state


def check_state(
    state: PyTree, like: PyTree, *, params: PyTree | None = None, repair: bool = False
) -> PyTree:
    """Checks a state that was restored from a file (Orbax, npz, ...), and returns it.

    Five things are checked:

    - The tree.
    - Shapes and dtypes.
    - The fingerprint of each row. It differs for another format, margin, algorithm or tensor.
    - Values, by `faults` of the quantizer. With `Delayed` a history must be finite and not
      negative. A scale must be unset, or be the scale that the amaxes of its history give. For a
      quantizer of your own, only the ranges are checked, unless it overrides `faults`.
    - The weights, if `params` is given. Without it, the state of another model with equal shapes
      passes, and weights may saturate.

    A weight may be up to 4 times larger than its scale allows, because a step of training changes
    it. It may be 3584 times smaller in E4M3, and 10^8 times in E5M2. Such weights keep their
    precision. Unset rows and recipes without state fit all weights, and so does `static()`. It has
    its scales in the recipe. Amaxes of x and g are not checked, because only a step shows them.

    With `Delayed`, two edits of a file are not found, because a training step can produce the same
    values. The first edit changes a history and its scale together. The second edit makes a scale
    up to 2^20 times larger than a full history gives. The history may just have dropped an entry
    that large. Both edits have an effect until the next commit. With `history_length=1` there is no
    history to compare a scale with.

    One kind of correct row is refused: the history just dropped an entry that is more than 2^20
    times its largest other entry. `repair` unsets such a row. With `params`, a state may be refused
    if a weight that started at 0 grew more than 4 times in one of the first steps.

    Args:
      state: the restored tree of states. It may have a dict of arrays in the place of each state,
        as in a file that is read without a target.
      like: a fresh state tree of the model, from `fp8.init_state` or the model's `init`, or its
        types (`jax.eval_shape`). Its layers may have different recipes.
      params: the weights that the state will be used with: `variables["params"]` of linen,
        `nnx.state(model, nnx.Param)`, or a tree of your own. Their amaxes are computed where the
        weights are. A `QuantizedWeight` holds its amax. In your own tree a weight is at the path of
        its state, or is the only array of two or more axes below it. In a layer it is `kernel`, or
        the only such array beside its state. Write None at the path of a state whose matmul has no
        weight, or reads a function of it. Weights of stacked states are stacked along leading axes,
        or shared by all layers.
      repair: whether to unset the bad rows, and list them in a warning. The next step uses the
        current amaxes of their tensors, as a first step does. If arrays have other shapes, the
        whole state of that matmul is unset.

    Returns:
      The tree of `like` with the arrays of `state`.

    Raises:
      FP8StateError: if a check fails. The message names each array, its value and the cure. If the
        trees differ, or a weight does not fit, the error is raised with `repair=True`, too. Also
        if `params` does not show the weight of a state.

    Warns:
      UserWarning: with `repair=True`, if a check fails. It lists the rows that were unset.

    Example:
      >>> import jaxfp8 as fp8
      >>> like = fp8.init_state(fp8.recipes.delayed())
      >>> saved = {"scale": [0, 0, float("nan")], "amax_history": like.amax_history,
      ...          "nonfinite_steps": like.nonfinite_steps, "fingerprint": like.fingerprint}
      >>> fp8.check_state(saved, like)
      Traceback (most recent call last):
      ...
      jaxfp8._typing.FP8StateError: 1 fault in the quantizer state: ...

      >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
      >>> recipe = fp8.recipes.delayed()
      >>> loss = lambda w, state: fp8.dot(x, w, recipe=recipe, state=state).sum()
      >>> _, _, state = fp8.value_and_grad(loss)(w, like)
      >>> state = fp8.check_state(state, like, params=w)
      >>> fp8.check_state(state, like, params=1000 * w)
      Traceback (most recent call last):
      ...
      jaxfp8._typing.FP8StateError: the quantizer state does not fit the weights of params ...
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        check_readable(f"params{jax.tree_util.keystr(path)}", leaf)
    found, places = [], []
    for names, place, expected, part in _parts_of(state, like):
        arrays = _arrays(part, place)
        wrong = list(_faults(part, arrays, expected))
        found += [_described(place, arrays, expected, fault) for fault in wrong]
        frozen = part.frozen if isinstance(part, MatmulState) else expected.frozen
        mended = dataclasses.replace(_mended(arrays, expected, wrong), frozen=frozen)
        settled = expected.settled and scales_are_set(mended)
        places.append(Place(place, names, dataclasses.replace(mended, settled=settled)))
    if found:
        plural = "s" * (len(found) > 1)
        text = f"{len(found)} fault{plural} in the quantizer state:\n{listed(found)}"
        if not repair:
            raise FP8StateError(
                f"{text}\nRestore another checkpoint, or unset these rows with "
                "fp8.check_state(state, like, repair=True). With flax, read the file without a "
                "target first: flax.serialization.msgpack_restore."
            )
        warnings.warn(f"{text}\nThese rows were unset (repair=True).", stacklevel=2)
    if params is not None:
        check_weights(places, params)
    structure = jax.tree.structure(like, is_leaf=is_state)
    return jax.tree.unflatten(structure, [place.state for place in places])


def check_readable(name: str, leaf: Any, error: type[ValueError] = FP8StateError) -> None:
    """Raise the error if an array has no values that can be read."""
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        raise error(
            f"{name} is {leaf}, whose values cannot be read. Call check_state on arrays, outside "
            "of jit, before the first step."
        )


# The places of states in a restored tree.
#
# The containers of a restored tree often differ from those of the model's tree. A file that is read
# without a target gives nested dicts. A list becomes a dict with the keys "0", "1" and so on. A
# Variable of nnx has one more level, "value". So places are compared by name.

_PLACES_SHOWN = 6


def _parts_of(state: PyTree, like: PyTree) -> list[tuple[Path, str, MatmulState, Any]]:
    """For each state of `like` its path, its place in messages, itself, and the node of `state`."""
    wanted: dict[Path, tuple[str, Any]] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(like, is_leaf=is_state)[0]:
        place = jax.tree_util.keystr(path) or "the state"
        if not is_state(node):
            raise FP8StateError(
                f"like holds a {type(node).__name__} at {place}, where a quantizer state is "
                "needed. Pass only the states, without parameters."
            )
        wanted[names_of(path)] = place, node
    found, others = {}, []

    def is_part(path: tuple[Any, ...], node: Any) -> bool:
        return is_state(node) or (isinstance(node, Mapping) and names_of(path) in wanted)

    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_part, is_leaf_takes_path=True)
    for path, node in leaves:
        if names_of(path) in wanted:
            # A file that is read without a target shows a Variable as one more level.
            boxed = isinstance(node, Mapping) and set(node) == {"value"}
            found[names_of(path)] = node["value"] if boxed else node
        else:
            others.append(jax.tree_util.keystr(path))
    missing = [place for names, (place, _) in wanted.items() if names not in found]
    if missing or others:
        raise FP8StateError(
            f"state has another tree than like. It lacks {missing[:_PLACES_SHOWN]} and holds "
            f"{others[:_PLACES_SHOWN]} besides ({len(missing)} and {len(others)} in all). Restore "
            "it into the tree of like, or make like from the model that was saved."
        )
    return [(names, *each, found[names]) for names, each in wanted.items()]


# The arrays of one state, their faults, and the state without its bad rows.


def _arrays(part: Any, place: str) -> dict[str, Any]:
    """The arrays of one restored state, by name."""
    if isinstance(part, MatmulState):
        arrays = {name: getattr(part, name) for name in LEAVES}
    elif isinstance(part, Mapping):
        # Orbax restores the absent probe as None.
        arrays = {name: leaf for name, leaf in part.items() if leaf is not None}
    else:
        raise FP8StateError(
            f"state holds a {type(part).__name__} at {place}, where a quantizer state is needed. "
            f"Pass a MatmulState, or a dict of its arrays {list(LEAVES)}."
        )
    if unknown := sorted(set(arrays) - set(LEAVES)):
        raise FP8StateError(
            f"state holds {unknown} at {place}. A saved state has only the arrays {list(LEAVES)}. "
            "Leave the others out."
        )
    for name, leaf in arrays.items():
        check_readable(f"{place}.{name}", leaf)
    return {
        name: leaf if hasattr(leaf, "dtype") else np.asarray(leaf, np.float32)
        for name, leaf in arrays.items()
    }


def _faults(part: Any, arrays: dict[str, Any], expected: MatmulState) -> Iterator[Fault]:
    """The faults of one state. A wrong shape or dtype is a fault of all its rows."""
    everywhere = np.ones(expected.scale.shape, bool)
    for name, shape in state_shapes(expected).items():
        if name not in arrays:
            yield Fault(
                name, everywhere, "it is missing: another program or version wrote the file"
            )
        elif arrays[name].shape != shape:
            differs = "the number of layers or rows, or history_length, differs"
            yield Fault(name, everywhere, f"its shape must be {list(shape)}; {differs}")
        elif arrays[name].dtype != jnp.float32:
            yield Fault(name, everywhere, f"its dtype is {arrays[name].dtype}, it must be float32")
        else:
            continue
        return
    if isinstance(part, MatmulState) and not same_rows(part.rows, expected.rows):
        yield Fault("rows", everywhere, f"its rows are {part.rows}, of another recipe")
        return
    host: dict[str, Any] = {name: on_host(leaf) for name, leaf in arrays.items()}
    want = fingerprints(expected.rows, expected.scale.shape)
    found = host["fingerprint"]
    foreign = ~tag_fits(dataclasses.replace(expected, **host))
    whats = np.full(foreign.shape, "", object)
    for at in map(tuple, np.argwhere(foreign)):
        whats[at] = (
            explain_fingerprint(found[at], want[at])
            or "the row was saved for another tensor or quantizer"
        )
    for what in dict.fromkeys(whats[foreign]):
        yield Fault("fingerprint", foreign & (whats == what), what)
    for r, row in enumerate(expected.rows):
        here = np.arange(len(expected.rows)) == r
        leaves: Any = (
            host["scale"][..., r], host["amax_history"][..., r, :], host["nonfinite_steps"][..., r]
        )  # fmt: skip
        for fault in row.quantizer.faults(RowState(*leaves)):
            # A row with a wrong fingerprint is already listed. This quantizer did not write it, so
            # its values may follow other rules.
            rows = (fault.rows[..., None] & here) & ~foreign
            if rows.any():
                yield fault._replace(rows=rows)


def _described(place: str, arrays: dict[str, Any], expected: MatmulState, fault: Fault) -> str:
    """A line of the message: the place, the value, its fault, and the row of the model."""
    indices = np.argwhere(fault.rows)
    row = expected.rows[indices[0][-1] if len(indices) else 0]
    whose = f"the model's row is {row.tensor} by {row.quantizer}"
    whose += f"; {len(indices) - 1} more rows have this fault" * (len(indices) > 1)
    if fault.leaf not in arrays:
        return f"  {place}.{fault.leaf}: {fault.what} ({whose})"
    value = on_host(arrays[fault.leaf])
    if value.shape != state_shapes(expected)[fault.leaf] or not len(indices):
        return f"  {place}.{fault.leaf} has shape {list(value.shape)}: {fault.what} ({whose})"
    shown = np.array2string(value[tuple(indices[0])], threshold=6, max_line_width=10_000)
    return f"  {place}.{fault.leaf}{indices[0].tolist()} = {shown}: {fault.what} ({whose})"


def _mended(arrays: dict[str, Any], expected: MatmulState, wrong: list[Fault]) -> MatmulState:
    """The state with its bad rows unset. Without bad rows no value changes."""
    if not wrong:
        return dataclasses.replace(expected, **arrays)
    bad = np.any([fault.rows for fault in wrong], axis=0)
    unset = unset_state(expected.rows, expected.scale.shape[:-1])

    def one(name: str) -> Any:
        fresh, given = np.asarray(getattr(unset, name)), arrays.get(name)
        if given is None or given.shape != fresh.shape or given.dtype != fresh.dtype:
            return _placed(fresh, getattr(expected, name))
        where = bad[..., None] if name == "amax_history" else bad
        return _placed(np.where(where, fresh, on_host(given)), given)

    return dataclasses.replace(expected, **{name: one(name) for name in LEAVES})


def _placed(values: np.ndarray, like: Any) -> Any:
    """The values, with the sharding of `like`."""
    sharding = getattr(like, "sharding", None)
    return jnp.asarray(values) if sharding is None else jax.device_put(values, sharding)
