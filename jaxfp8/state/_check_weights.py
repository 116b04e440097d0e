"""Whether quantizer states fit the weights of a model, for `check_state(params=)`.

A stored scale was chosen for the amax of a weight. If another weight takes its place, the scale
may be wrong by any factor. A larger weight then saturates, without an error, in the first step and
in each evaluation. A training step commits the amaxes of its own weights, so the amax of a weight
and its scale differ by one step only.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxfp8._typing import Array, FP8StateError, PyTree
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._exact import TINY
from jaxfp8.recipes._recipe import Row
from jaxfp8.state._saved import listed, names_of
from jaxfp8.state._state import MatmulState, is_state
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight

# Reading the values of arrays that may be split over the devices of several processes.


def on_host(leaf: Any) -> np.ndarray:
    """The values of an array.

    Every process must call it for an array that no process holds whole.
    """
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


# The weight of each state, and the comparison of its amax with the scale.

_MOST_GROWTH = 4.0
"""How many times the amax of a weight may exceed the largest value that its scale can hold.

One step of training makes a weight larger than the state has seen. Weights that start at 0 grow
most: with Adam and linear warm-up from 0 to 3 times in their second step. A weight of normal
numbers that is 4 times too large has a relative error of 0.32 (0.07 at 2 times, 0.026 if nothing
saturates).
"""
_LEAST_NORMALS = 8.0
"""How many times the smallest normal value the amax of a weight must be, in units of its scale.

FP8 keeps the relative precision of normal values. So a weight may be far too small. In E4M3 this
limit is 3584 times. One of normal numbers has a relative error of 0.026 in E4M3, 0.031 if it is
2^12 times too small, and 0.05 at 2^13 times. Weights do not fall so far within one history.
"""
Path = tuple[str, ...]


class Place(NamedTuple):
    """A state of a tree: how messages call its place, its path of names, and the state."""

    shown: str
    path: Path
    state: MatmulState


def check_weights(places: Sequence[Place], params: PyTree) -> None:
    """Raise FP8StateError unless each state fits its weight; see `check_state`."""
    weights = _weights_of(
        [place for place in places if any(row.tensor == "w" for row in place.state.rows)], params
    )
    # All reductions are started before the first result is read.
    amaxes = [_amaxes(weight, _stacked(weight, place)) for place, _, weight in weights]
    lines: list[str] = []
    for (place, name, _), amax in zip(weights, map(_known, amaxes), strict=True):
        scales = on_host(place.state.scale)
        for r, row in enumerate(place.state.rows):
            if row.tensor == "w":
                scale = scales[..., r]
                of_each = np.broadcast_to(amax, scale.shape)  # layers may share one weight
                lines += _misfits(f"{place.shown}.scale", name, row, scale, of_each, r)
    if lines:
        raise FP8StateError(
            f"the quantizer state does not fit the weights of params ({len(lines)} "
            f"scale{'s' * (len(lines) > 1)}):\n{listed(lines)}\nRestore params and state of one "
            "step of one run. With other weights start from a fresh state, such as like: the next "
            "step takes current amaxes. repair=True does not mend it, because the rows of x and g "
            "belong to the other weights, too. If a matmul does not multiply by the parameter "
            "itself, but by w / 8 for instance, put the array that it reads at the path of its "
            "state in params, or None."
        )


def _misfits(
    leaf: str, name: str, row: Row, scale: np.ndarray, amax: np.ndarray, r: int
) -> list[str]:
    """A line if one row of a state does not fit its weight. Leading axes stack layers."""
    format = row.quantizer.value_format
    if format is None:
        return []
    largest = scale.astype(np.float64) * format.max
    is_set = scale > 0  # an unset row takes the current amax
    above = is_set & (amax > _MOST_GROWTH * largest)
    # A margin of the user's may leave few normal values. Then a fresh scale is as large.
    below = is_set & (amax >= TINY) & (amax < _LEAST_NORMALS * 2.0**format.min_exponent * scale)
    if below.any():
        fresh = row.quantizer.scale_of_amax(jnp.asarray(amax, jnp.float32)).scale
        below &= np.asarray(fresh).astype(np.float64) * _MOST_GROWTH < scale
    indices = np.argwhere(above | below)
    if not len(indices):
        return []
    first = tuple(indices[0])
    index = [*map(int, first), r]
    largest_value, found = float(largest[first]), float(amax[first])
    what = f"the amax of {name} is {found:.4g}, and this scale is for amaxes up to "
    what += f"{largest_value:.4g}. "
    if not np.isfinite(found):
        what += "The weight is not finite"
    elif above[first]:
        what += f"Values {found / largest_value:.4g} times too large would saturate"
    else:
        what += f"Values {largest_value / found:.4g} times too small would lose their precision"
    more = f"; {len(indices) - 1} more layers of this stack have a fault" * (len(indices) > 1)
    return [f"  {leaf}{index} = {float(scale[first]):.4g}: {what}{more}"]


def _weights_of(places: Sequence[Place], params: PyTree) -> list[tuple[Place, str, Any]]:
    """The weight of each state that has one, with its name. FP8StateError if one is unclear."""
    arrays = {
        names_of(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_leaf)
        if not is_state(leaf)
    }
    exact = {place.path for place in places if place.path in arrays}
    # A file that is read without a target shows a box of linen or a Variable as one more level.
    alone = Counter(path[:-1] for path in arrays)
    arrays = {
        path[:-1] if path[-1:] == ("value",) and alone[path[:-1]] == 1 and path not in exact
        else path: leaf
        for path, leaf in arrays.items()
    }  # fmt: skip
    layers: dict[Path, dict[Path, Any]] = {}
    for path, leaf in arrays.items():
        if path and _is_float(leaf):
            layers.setdefault(path[:-1], {})[path] = leaf
    claims = [[place.path] if place.path in exact else _beside(place, layers) for place in places]
    readers = Counter(path for claim in claims for path in claim)
    found, lost, lines = [], [], []
    for place, claim in zip(places, claims, strict=True):
        leaf = arrays[claim[0]] if claim else None
        if len(claim) == 1 and leaf is None:
            continue  # the user says that this matmul has no weight
        name = ", ".join(map("/".join, claim)) or "params"
        fault = _fault(claim, name, readers, leaf, place)
        if fault:
            lines.append(f"  {place.shown}: {fault}")
            lost.append(place)
        else:
            found.append((place, name, leaf))
    if lines:
        explicit = "w"
        for part in reversed(lost[0].path):
            explicit = f"{{{part!r}: {explicit}}}"
        raise FP8StateError(
            f"params does not show the weight of {len(lines)} of {len(places)} states:\n"
            f"{listed(lines)}\nPass the parameters of the same model: variables['params'] beside "
            "variables[fp8.linen.COLLECTION] (linen), or nnx.state(model, nnx.Param). In another "
            f"tree, put each weight at the path of its state, here {explicit}. Put None there if "
            "the matmul has no weight."
        )
    return found


def _beside(place: Place, layers: dict[Path, dict[Path, Any]]) -> list[Path]:
    """The arrays that may be the weight of a state, in the layer that the state belongs to.

    `layers` has the arrays of each layer, by the path of the layer.

    Layers of linen keep a state at LAYER/fp8 or LAYER/PLUG/fp8, those of nnx at LAYER/state or
    LAYER/PLUG/state. In other trees a state has the path of its layer.
    """
    near = [place.path]
    if place.path and (place.path[-1].startswith("fp8") or place.path[-1] == "state"):
        near += [place.path[:-1], place.path[:-2]]
    axes = place.state.scale.ndim - 1 + 2  # a bias has fewer, unless its layer has a kernel
    for layer in near:
        own = layers.get(layer, {})
        kernels = [path for path in own if path[-1] == "kernel"]
        if found := kernels or [path for path in own if own[path].ndim >= axes]:
            return found
    return []


def _is_leaf(node: Any) -> bool:
    return node is None or is_weight(node) or is_state(node)


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, QuantizedWeight):
        return leaf.amaxes is not None
    return hasattr(leaf, "ndim") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _fault(claim: list[Path], name: str, readers: Counter[Path], leaf: Any, place: Place) -> str:
    """Why the arrays that a state claims do not show its weight; "" if they do."""
    if not claim:
        return "params has no weight there, nor beside it"
    if len(claim) > 1:
        return f"each of {name} may be its weight"
    if readers[claim[0]] > 1:
        return f"{name} may be the weight of another state, too"
    if not _is_float(leaf):
        return f"{name} is of type {type(leaf).__name__}, and no array of floats with a known amax"
    lead = place.state.scale.shape[: _stacked(leaf, place)]
    array: Any = leaf.amaxes if isinstance(leaf, QuantizedWeight) else leaf
    if array.shape[: len(lead)] != lead:
        return (
            f"{name} has shape {list(leaf.shape)}. The states are stacked as {list(lead)}, so its "
            "leading axes must be these. Move its axes (jnp.moveaxis). If the layers share it, "
            "repeat it for each (jnp.broadcast_to)"
        )
    return ""


def _stacked(weight: Any, place: Place) -> int:
    """Along how many leading axes a weight is stacked as its state is; 0 if layers share it.

    A weight has two axes of its own at least. So an array with fewer is that of all layers.
    """
    lead = place.state.scale.ndim - 1
    return lead if len(weight.shape) >= lead + 2 else 0


def _amaxes(weight: Any, stacked: int) -> Any:
    """The amax of each weight of a stack. A weight in FP8 has it already."""
    if isinstance(weight, QuantizedWeight):
        weight = weight.amaxes
    axes = tuple(range(stacked, weight.ndim))
    if isinstance(weight, np.ndarray):  # a restored stack may not fit on one device
        with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN, which is an answer here
            return np.maximum(weight.max(axes, initial=0), -weight.min(axes, initial=0))
    return _largest(weight, axes)


@functools.partial(jax.jit, static_argnums=1)
def _largest(weight: Array, axes: tuple[int, ...]) -> Array:
    return jnp.max(magnitude(weight), axes, initial=0)


def _known(amax: Any) -> np.ndarray:
    """The amaxes as float64 on this host, with inf for NaN."""
    values = on_host(amax).astype(np.float64)
    return np.where(np.isnan(values), np.inf, values)
