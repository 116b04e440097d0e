"""Checkpoints: the places of states in a restored tree, and arrays by the names of a model.

A checkpoint that was saved before a model ran in FP8 has all its arrays but the quantizer state.
`saved_leaves` reads them by name, since the containers of a restored tree often differ from those
of the model (see `names_of`). `match_leaves` finds the array for each place of the model.
"""

import difflib
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.state._state import LEAVES, describe_node, is_state

# Names along a path. The containers of a restored tree often differ from those of the model's tree.


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names along a path, the same for all kinds of containers.

    The attribute `value` of a Variable is left out. A key "value" of a dict is a name.
    """
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return tuple(
        str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path
    )


# The arrays of a checkpoint, by the names of a model.

Path: TypeAlias = tuple[str, ...]


def listed(lines: list[str]) -> str:
    """The lines of a message, the first ten of them."""
    return "\n".join(lines[:10]) + f"\n  ... ({len(lines)} in all)" * (len(lines) > 10)


def saved_leaves(
    saved: PyTree,
    rename: Mapping[str, str],
    *,
    called: str,
    read: Callable[[Any], Any],
    kept: int = 0,
) -> dict[Path, Any]:
    """The leaves of a saved tree by their path of names, some of which are replaced.

    `rename` maps regular expressions that a whole name must match to replacements. The first match
    decides. The names of the `kept` levels at the top stay. `read` takes an array out of a box or a
    Variable. `called` is what messages call `saved`.
    """
    patterns = _compiled(rename)
    leaves: dict[Path, Any] = {}
    names: set[str] = set()
    used: set[str] = set()
    olds: dict[Path, Path] = {}

    def new_name(name: str) -> str:
        names.add(name)
        for pattern, replacement in patterns.items():
            if match := pattern.fullmatch(name):
                used.add(pattern.pattern)
                return _expanded(match, replacement)
        return name

    for keys, node in jax.tree_util.tree_leaves_with_path(saved, is_leaf=_is_end):
        inner, old = read(node), names_of(keys)
        new: Path = ()
        if is_state(inner) or _is_state_of_file(node):
            raise FP8StateError(
                f"{called} holds quantizer state at {'/'.join(old)}, but a checkpoint without it "
                "is needed. Restore a checkpoint of an FP8 model as it is, and check its state: "
                "fp8.check_state(state, like=fresh_state)."
            )
        for depth, name in enumerate(old):
            above, new = new, (*new, new_name(name) if depth >= kept else name)
            other = olds.setdefault(new, old[: depth + 1])
            if other != old[: depth + 1]:
                raise ValueError(
                    f"rename={dict(rename)} makes one name {new[-1]!r} of {other[-1]!r} and "
                    f"{name!r} at {_at(above)}. Each name needs one of its own. Keep numbers: "
                    '{r"Dense_(\\d+)": r"FP8Dense_\\1"}.'
                )
        for below, leaf in jax.tree_util.tree_leaves_with_path(inner, is_leaf=_is_none):
            leaves[new + names_of(below)] = leaf
    for pattern in rename:
        if pattern not in used:
            near = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.0)
            raise ValueError(
                f"rename: {pattern!r} matches no name of {called} that an earlier pattern does not "
                f"match. The nearest names are {near}. A pattern must match a whole name, which is "
                "one part of a path."
            )
    return leaves


def _is_end(node: Any) -> bool:
    """Whether names end here: at an array, a box or a Variable, or the state of a matmul."""
    return _is_state_of_file(node) or not (isinstance(node, Mapping | list) or type(node) is tuple)


def _is_state_of_file(node: Any) -> bool:
    return isinstance(node, Mapping) and set(LEAVES) <= set(node)


def _is_none(node: Any) -> bool:
    return node is None


def _compiled(rename: Any) -> dict[re.Pattern[str], str]:
    if not isinstance(rename, Mapping) or not all(
        isinstance(each, str) for each in (*rename, *rename.values())
    ):
        raise TypeError(
            f"rename={rename!r} must be a dict of regular expressions and replacements. Write "
            'for instance rename={r"Dense_(\\d+)": r"FP8Dense_\\1"}.'
        )
    try:
        return {re.compile(pattern): replacement for pattern, replacement in rename.items()}
    except re.error as error:
        raise ValueError(
            f"rename={dict(rename)} holds an invalid regular expression: {error}. Escape special "
            "characters with a backslash."
        ) from None


def _expanded(match: re.Match[str], replacement: str) -> str:
    try:
        return match.expand(replacement)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"rename: {replacement!r} is no replacement for {match.re.pattern!r}: {error}. Groups "
            r"are \1, \2 and so on."
        ) from None


def match_leaves(
    wanted: Mapping[Path, Any], found: Mapping[Path, Any], *, called: str, optional: Container[Path]
) -> dict[Path, Any]:
    """The saved leaf for each place of a model, in the model's dtype.

    `wanted` and `found` are by path of names. Only places in `optional` may be missing. ValueError
    if paths or shapes differ, or if the model's dtype cannot hold the saved values.
    """
    # A file shows a box of linen or a Variable of nnx as one more level, "value".
    found = {
        path[:-1] if path not in wanted and path[-1:] == ("value",) else path: leaf
        for path, leaf in found.items()
    }
    missing = [path for path in wanted if path not in found and path not in optional]
    unexpected = [path for path in found if path not in wanted]
    wrong = [(path, why) for path in wanted if path in found
             for why in _faults(wanted[path], found[path])]  # fmt: skip
    if missing or unexpected or wrong:
        lines = [f"  {_at(p)}: missing{_nearest(p, unexpected or found)}" for p in missing]
        lines += [f"  {_at(p)}: unexpected{_nearest(p, missing or wanted)}" for p in unexpected]
        lines += [f"  {_at(path)}: {why}" for path, why in wrong]
        raise ValueError(
            f"{called} must hold the arrays of the model and no others:\n{listed(lines)}\n"
            + " ".join(_cures(missing, unexpected, dict(wrong)))
        )
    return {path: _as_dtype(found[path], like.dtype) for path, like in wanted.items()
            if path in found}  # fmt: skip


def _at(path: Path) -> str:
    return "/".join(path) or "the top of the tree"


def _nearest(path: Path, others: Container[Path]) -> str:
    paths: Any = others
    near = difflib.get_close_matches(_at(path), map(_at, paths), n=1, cutoff=0.6)
    return f" (the nearest name is {near[0]})" if near else ""


def _faults(wanted: Any, leaf: Any) -> Iterator[str]:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        yield f"it is {describe_node(leaf)}, but an array is needed"
    elif shape != wanted.shape:
        yield f"its shape is {list(shape)}, but the model's is {list(wanted.shape)}"
    elif dtype != wanted.dtype and not holds(wanted.dtype, dtype):
        yield f"its dtype is {dtype}, but the model's is {wanted.dtype}, which cannot hold it"


def holds(wide: Any, narrow: Any) -> bool:
    """Whether a dtype holds all values of another one."""
    extended = any(jnp.issubdtype(d, jax.dtypes.extended) for d in (wide, narrow))
    return not extended and np.can_cast(narrow, wide, "safe")


def _as_dtype(leaf: Any, dtype: Any) -> Any:
    if leaf.dtype == dtype:
        return leaf
    return (
        leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)
    )


def _cures(missing: list[Path], unexpected: list[Path], wrong: dict[Path, str]) -> Iterator[str]:
    if missing and unexpected:
        yield (
            'If only names differ, write rename={r"Dense_(\\d+)": r"FP8Dense_\\1"} for instance, '
            "or name the layers."
        )
    elif missing:
        yield "Save or restore these too, or take them from a fresh model."
    elif unexpected:
        yield "Leave these out, or add their layers to the model."
    if any("shape" in why for why in wrong.values()):
        yield "For other shapes, make the model with the sizes of the checkpoint."
    if any("dtype" in why for why in wrong.values()):
        yield "For other dtypes, convert the arrays by .astype, or set param_dtype= of the layers."
