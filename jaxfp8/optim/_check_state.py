"""`check_state`: the check of restored optimizer state before a step uses it."""

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import PyTree
from jaxfp8.numerics._exact import LARGEST, TINY
from jaxfp8.numerics._formats import format_of
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.optim._eight_bit_formats import LEAST_ROOT, ExpandedFP8State, Int8State, LinearInt8State
from jaxfp8.optim._masters import BFloat16PlusState, Float16State, Float32State, FP8State
from jaxfp8.optim._moments import FIRST, SECOND, is_stored_moment, restore_moment_nodes
from jaxfp8.optim._released import Released
from jaxfp8.state._check_state import check_readable
from jaxfp8.state._check_weights import on_host
from jaxfp8.state._saved import names_of

# Values of a stored moment or master weight that no run makes, and those of a run that diverged.
#
# All functions compute with NumPy, on the host.

_DIVERGED = "it must be finite: training had diverged before the save, or the file is damaged"
_LEAST_FLOAT16 = 0x77FF  # the bits of 32752, half of the largest float16


class _Fault(NamedTuple):
    """A fault of some values. There may be none."""

    array: str
    where: np.ndarray  # bool, like the array
    what: str


def _value_faults(kind: Any, field: str, host: dict[str, np.ndarray]) -> Iterator[_Fault]:
    """Values that no run makes, and those of a run that diverged."""
    second = field in SECOND
    values: Any = host.get("values")
    if kind in (Int8State, LinearInt8State):
        name = "roots" if kind is Int8State else "codes"
        codes = host[name]
        yield _Fault(name, codes == -128, "codes are -127 to 127")
        if codes.dtype == np.uint8:
            small = (codes > 0) & (codes < LEAST_ROOT)
            yield _Fault(name, small, f"a second moment above 0 has a root of {LEAST_ROOT} or more")
        # The rounding of the largest value may end one code below the last one.
        near = 254 if codes.dtype == np.uint8 else 126
        yield from _group_faults(np.abs(codes).view(np.uint8), near, host["largest"])
    elif kind is ExpandedFP8State:
        magnitude, last = yield from _float_faults(values, second)
        power = host["power"]
        yield _Fault("power", ~((power >= 0.125) & (power < 11_521)), "powers are 1/8 to 11,520")
        yield from _group_faults(magnitude, last - 1, host["largest"])
    elif kind in (QuantizedTensor, FP8State):
        magnitude, last = yield from _float_faults(values, second)
        # The scale is the inverse of a rounded quotient.
        most = LARGEST / format_of(values.dtype).max * (1 + 1e-6)
        yield from _tensor_faults(magnitude, last - 1, host["scale"], most)
    elif kind is Float16State:
        magnitude, _ = yield from _float_faults(values, second)
        scale = host["scale"]
        mantissa = np.frexp(np.where(np.isfinite(scale), scale, 1))[0]
        yield _Fault("scale", np.abs(mantissa) != 0.5, "it must be a power of two")
        yield from _tensor_faults(magnitude, _LEAST_FLOAT16, scale, 2.0**113)
    elif kind is BFloat16PlusState:
        if "high" in host:
            yield _Fault("high", ~np.isfinite(_joined(host["high"], host["low"])), _DIVERGED)
    else:
        yield from _plain_faults(field, host)


def _plain_faults(field: str, host: dict[str, np.ndarray]) -> Iterator[_Fault]:
    """Of arrays that no format has packed."""
    for name, x in host.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x if x.dtype.itemsize > 2 else x.astype(np.float32)
            if field in FIRST | SECOND | {"masters"}:
                yield _Fault(name, ~np.isfinite(x), _DIVERGED)
            else:  # optax has inf in some states, such as the best loss so far
                yield _Fault(name, np.isnan(x), _DIVERGED)
            if field in SECOND:
                yield _Fault(name, x < 0, "a second moment is not negative")
        elif any(word in field for word in ("count", "step", "notfinite")):
            yield _Fault(name, x < 0, "it counts, so it is not negative")


def _float_faults(
    values: np.ndarray, second: bool
) -> Generator[_Fault, None, tuple[np.ndarray, int]]:
    """Of packed floats. Returns their magnitudes as codes, and the last finite code."""
    bits = values.view(f"uint{8 * values.dtype.itemsize}")
    last = int(jnp.finfo(values.dtype).max.view(bits.dtype))
    magnitude = bits & ((1 << (8 * values.dtype.itemsize - 1)) - 1)
    yield _Fault("values", magnitude > last, _DIVERGED)
    if second:
        negative = (bits != magnitude) & (magnitude > 0)
        yield _Fault("values", negative, "a second moment is not negative")
    return magnitude, last


def _group_faults(magnitude: np.ndarray, near: int, largest: np.ndarray) -> Iterator[_Fault]:
    """Of codes [..., C] beside the largest magnitude of each group [..., G], 0 if all codes are 0.

    The code of the largest value of a group is `near` or more in magnitude.
    """
    normal = np.isfinite(largest) & (largest >= TINY)
    diverged = "it must be finite. One inf or NaN in a gradient makes NaN of a whole group: "
    yield _Fault("largest", ~np.isfinite(largest), diverged + "training diverged before the save")
    low = np.isfinite(largest) & ~normal & (largest != 0)
    yield _Fault("largest", low, "it must be 0 or a normal positive number (2^-126 or more)")
    wrong = []
    # The size of a group is not stored. A few sizes give the same number of groups.
    for size in _group_sizes(magnitude.shape[-1], largest.shape[-1]):
        tops = _tops(magnitude, size, largest.shape[-1])
        wrong.append((normal & (tops < near), (largest == 0) & (tops > 0)))
        if not np.any(wrong[-1]):
            break
    missing, some = wrong[-1] if not np.any(wrong[-1]) else wrong[0]
    yield _Fault("largest", missing, f"a code of its group must be {near} or more in magnitude")
    yield _Fault("largest", some, "it is 0, so all codes of its group must be 0")


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
) -> Iterator[_Fault]:
    """Of codes [..., *axes] beside the scale of each tensor [...], 1 if all codes are 0.

    The code of the largest value of a tensor is `near` or more in magnitude. Scales are 2^-126 to
    `most`.
    """
    yield _Fault("scale", ~np.isfinite(scale), _DIVERGED)
    low = np.isfinite(scale) & ((scale < TINY) | (scale > most))
    yield _Fault("scale", low, f"scales are 2^-126 to {most:.3g}")
    top = magnitude.max(tuple(range(scale.ndim, magnitude.ndim)))
    # The smallest scale is that of all smaller values, too.
    free = (scale <= TINY) | ~np.isfinite(scale) | (scale > most)
    yield _Fault("scale", ~free & (top == 0) & (scale != 1), "it must be 1, as all values are 0")
    lost = ~free & (top > 0) & (top < near)
    yield _Fault("scale", lost, "it is too large for its values: none is near the largest code")


def _joined(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """`_joined` of `_masters`, in NumPy."""
    wide = low.astype(np.uint32) << (8 if low.dtype == np.uint8 else 0)
    top = high.view(np.uint16).astype(np.uint32)
    return (((top - (wide >> 15)) << 16) | wide).view(np.float32)


# The check: the parts of a state, by their names, and the faults of each.

_SHOWN = 10  # faults that a message lists
_NAMES = ("codes", "roots", "largest", "power", "values", "scale", "high", "low")
_SIGNED = (optax.ScaleBySM3State, optax.contrib.SophiaState)  # their `nu` can be negative


class _Part(NamedTuple):
    """The arrays of one moment, of one master weight, or another array."""

    place: str
    kind: Any  # the type of the node that holds them, or None
    field: str  # "mu", "nu", "masters", "count", ...
    names: tuple[str, ...]  # of the node
    arrays: dict[str, tuple[str, tuple[str, ...], Any]]  # place, names and type of each


def check_state(opt_state: PyTree, like: PyTree) -> PyTree:
    """Checks an optimizer state that was restored from a file (Orbax, npz, ...), and returns it.

    Four things are checked:

    - The tree.
    - The format of each moment and master weight, by the names of its arrays.
    - Shapes and dtypes.
    - Values that no run makes. These are negative scales, codes that do not fit their scale, a
      negative second moment, and a negative count.

    Moments and master weights must be finite, and other arrays must not be NaN. A run whose
    gradients were inf or NaN saves such values. They are refused, because no later step removes
    them.

    There is no `repair`. No value is safe: the update divides by the root of a second moment, and a
    master weight of 0 is a weight of 0.

    These faults are not found, because a training step can produce the same values:

    - A scale, or a power of `ExpandedFP8`, that was replaced by another possible one.
    - Other codes below the largest one of a group (`Int8`, `ExpandedFP8`) or tensor (`FP8`,
      `Float16`), other finite numbers, and other remainders of `BFloat16Plus`.
    - Two arrays of the same type that were exchanged, or a state of other parameters.
    - Another `group=` with the same number of groups.
    - A companded first moment of a version before `Int8State.roots`, read as dicts for
      `Int8(companding=False)`. Its arrays have the same names and types.

    Args:
      opt_state: the restored state. Dicts may be in the place of other nodes, as in a file that is
        read without a target.
      like: `tx.init(params)`, or its types `jax.eval_shape(tx.init, params)`. For `Released` it is
        `layers.opt_state`.

    Returns:
      The tree of `like` with the arrays of `opt_state`.

    Raises:
      ValueError: if a check fails. The message names each array, its value and the cure.

    Example:
      >>> from jaxfp8.optim import adamw
      >>> like = adamw(1e-3).init({"w": jnp.ones((64, 64))})
      >>> moments = like.inner[0]
      >>> bad = moments.mu["w"]._replace(largest=jnp.full((64, 1), -1.0))
      >>> inner = (moments._replace(mu={"w": bad}), *like.inner[1:])
      >>> check_state(like._replace(inner=inner), like)
      Traceback (most recent call last):
      ...
      ValueError: 1 fault in the optimizer state:
        .inner[0].mu['w'].largest[0, 0] = -1.: it must be 0 or a normal positive number ...
    """
    _refuse_released(opt_state, like)
    parts = list(_parts(like))
    wanted = {names for part in parts for _, names, _ in part.arrays.values()}
    found, places = _found(opt_state, wanted)
    lines: list[str] = []
    for part in parts:
        lines += _tree_faults(part, found, places) or _array_faults(part, found)
    lines += [f"  {places[names]}: like has no such array" for names in places]
    if lines:
        text = f"{len(lines)} fault{'s' * (len(lines) > 1)} in the optimizer state:\n"
        text += "\n".join(lines[:_SHOWN]) + "\n..." * (len(lines) > _SHOWN)
        raise ValueError(
            f"{text}\nRestore an earlier checkpoint, and make tx and params as in the run that was "
            "saved. Or start anew with tx.init(params): moments at 0, master weights at the "
            "parameters."
        )
    return jax.tree_util.tree_map_with_path(lambda path, _: found[_names_of(path)], like)


def _refuse_released(*trees: PyTree) -> None:
    def is_released(node: Any) -> bool:
        return isinstance(node, Released)

    if any(map(is_released, jax.tree.leaves(trees, is_leaf=is_released))):
        raise ValueError(
            "a Released holds its optimizer state as floats of other dtypes. Pass its opt_state: "
            "optim.check_state(layers.opt_state, like)."
        )


def _is_node(node: Any) -> bool:
    return is_stored_moment(node) or isinstance(node, Float32State | BFloat16PlusState | FP8State)


def _names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """`names_of` without the attribute of a Variable of nnx, which may hold a whole node."""
    return names_of(tuple(key for key in path if key != GetAttrKey("value")))


def _parts(like: PyTree) -> Iterator[_Part]:
    """All arrays of `like`. Those that belong together are one part."""

    def is_signed(node: Any) -> bool:
        return isinstance(node, _SIGNED)

    like = restore_moment_nodes(like)
    nodes = tree_flatten_with_path(like, is_leaf=is_signed)[0]
    signed = {path for path, node in nodes if is_signed(node)}
    for path, node in tree_flatten_with_path(like, is_leaf=_is_node)[0]:
        kind = type(node) if _is_node(node) else None
        if isinstance(node, QuantizedTensor) and not isinstance(node.granularity, PerTensor):
            kind = None  # no format of moments stores it: an averaged gradient, for instance
        field = _field_of(path)
        if field in SECOND and any(path[: len(prefix)] == prefix for prefix in signed):
            field = "mu"
        parts: dict[tuple[str, ...], _Part] = {}
        for sub, leaf in tree_flatten_with_path(node)[0]:
            # The first key is a field of the node. In a state of masters a tree is below.
            first = sub[:1] if kind else ()
            below = sub[len(first) :]
            part = parts.setdefault(
                _names_of(below),
                _Part(keystr(path) + keystr(below), kind, field, _names_of(path), {}),
            )
            whole = (*path, *sub)
            name = first[0].name if first else ""
            part.arrays[name] = keystr(whole) or "the state", _names_of(whole), leaf
        yield from parts.values()


def _field_of(path: tuple[Any, ...]) -> str:
    """The field of a state that an array is in. Averaged gradients may have fields of their own."""
    names = [key.name for key in path if isinstance(key, GetAttrKey) and key.name != "value"]
    known = FIRST | SECOND | {"masters", "acc_grads"}
    return next((name for name in names if name in known), names[-1] if names else "")


def _found(
    state: PyTree, wanted: set[tuple[str, ...]]
) -> tuple[dict[tuple[str, ...], Any], dict[tuple[str, ...], str]]:
    """The restored arrays by their names, and the places of those that `like` does not have."""
    found, places = {}, {}
    for path, leaf in tree_flatten_with_path(state)[0]:
        names = _names_of(path)
        if names not in wanted:  # in a file of nnx without a target, a Variable is a dict
            bare = tuple(name for name in names if name != "value")
            names = bare if bare in wanted else names
        if names not in wanted:
            places[names] = keystr(path) or "the state"
        check_readable(keystr(path) or "the state", leaf, ValueError)
        found[names] = leaf
    return found, places


def _tree_faults(part: _Part, found: dict[Any, Any], places: dict[Any, str]) -> list[str]:
    """A line for a part that lacks arrays, with what the state has in its place."""
    missing = [name for name, (_, names, _) in part.arrays.items() if names not in found]
    if not missing:
        return []
    _, names, _ = part.arrays[missing[0]]
    below = names[len(part.names) + 1 :]
    others = {name: (*part.names, name, *below) for name in _NAMES} | {"array": part.names}
    held = {name: found[at] for name, at in others.items() if places.pop(at, None) is not None}
    kind = f" {part.kind.__name__}" if part.kind else ""
    needed = _types({name or "array": leaf for name, (_, _, leaf) in part.arrays.items()})
    if not held:
        lacks = ", ".join(part.arrays[name][0] for name in missing)
        return [f"  {lacks}: missing. like has{kind} {needed} there"]
    return [
        f"  {part.place} holds {_types(held)}, and like has{kind} {needed}: another format, "
        "another companding=, or an older version of jaxfp8 has stored it"
    ]


def _types(arrays: dict[str, Any]) -> str:
    each = (f"{name} {_dtype_of(x)}{list(np.shape(x))}" for name, x in arrays.items())
    return f"({', '.join(each)})"


def _dtype_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _array_faults(part: _Part, found: dict[Any, Any]) -> list[str]:
    """A line for each fault of a part that has all arrays."""
    host: dict[str, np.ndarray] = {}
    for name, (place, names, expected) in part.arrays.items():
        leaf, dtype = found[names], _dtype_of(expected)
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf, dtype)
        if np.shape(leaf) != np.shape(expected):
            needed = f"its shape must be {list(np.shape(expected))}: parameters or groups differ"
            return [f"  {place} has shape {list(np.shape(leaf))}: {needed}"]
        if leaf.dtype != dtype:
            return [f"  {place} has dtype {leaf.dtype}: it must be {dtype}, as like has it"]
        # Keys of jax.random and bools can have any value.
        if jnp.issubdtype(dtype, jnp.number) and leaf.size:
            host[name] = on_host(leaf)
    if len(host) < len(part.arrays):
        return []
    lines = []
    for array, where, what in _value_faults(part.kind, part.field, host):
        count = int(np.count_nonzero(where))
        if not count:
            continue
        at = np.unravel_index(np.argmax(where), where.shape)
        index = str([int(i) for i in at]) if at else ""
        shown = np.array2string(np.asarray(host[array][at]))
        more = f" ({count - 1} more values have this fault)" * (count > 1)
        lines.append(f"  {part.arrays[array][0]}{index} = {shown}: {what}{more}")
    return lines
