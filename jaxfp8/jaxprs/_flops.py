"""Operations of the matmuls and convolutions of a traced function, by layer."""

import math
from collections import Counter
from typing import Any

import jax

_MARK = "jaxfp8.layer:"
_END = ":"
OTHER = "(no layer)"
"""The key of operations outside of layers. A model that is a layer has the path ""."""
MATMULS = ("dot_general", "ragged_dot_general")
CONVOLUTIONS = ("conv_general_dilated",)
"""Names of primitives."""


def layer_scope(path: str) -> Any:
    """A context that marks the operations of a layer."""
    return jax.named_scope(f"{_MARK}{path.replace('/', _END)}{_END}")


def is_in_layer(eqn: Any) -> bool:
    """Whether an operation, or the whole program that it runs, is in the scope of a layer."""
    return _MARK in str(eqn.source_info.name_stack)


def flops_of(jaxpr: Any) -> tuple[Counter[str], frozenset[str]]:
    """Operations by path of a layer, and the paths of layers that a loop runs more than once.

    `OTHER` has the operations outside of layers. A scan counts as often as its length, a branch as
    its largest one, and a `while` once.
    """
    found, repeated = Counter[str](), set[str]()
    _count(jaxpr, 1, "", found, repeated)
    return found, frozenset(repeated - {OTHER})


def _count(jaxpr: Any, times: int, outer: str, found: Counter[str], repeated: set[str]) -> None:
    for eqn in jaxpr.eqns:
        names = f"{outer}/{eqn.source_info.name_stack}"
        if flops := _FLOPS.get(eqn.primitive.name):
            found[_path(names)] += times * flops(eqn)
            if times > 1:
                repeated.add(_path(names))
        inner_times = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        if eqn.primitive.name == "cond":
            branches = [Counter[str]() for _ in eqn.params["branches"]]
            for branch, counter in zip(eqn.params["branches"], branches, strict=True):
                _count(branch.jaxpr, inner_times, names, counter, repeated)
            found.update(max(branches, key=lambda branch: sum(branch.values())))
            continue
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                _count(inner, inner_times, names, found, repeated)


def _path(names: str) -> str:
    """The layer in whose scope an operation is."""
    if _MARK not in names:
        return OTHER
    marked = names.rsplit(_MARK, 1)[1]
    return marked[: marked.rindex(_END)].replace(_END, "/")


def _of_matmul(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracted)


def _of_ragged(eqn: Any) -> int:
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dims.dot_dimension_numbers
    lhs, groups = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape[-1]
    # Each group contracts its own rows of a ragged axis.
    shared = groups if set(dims.lhs_ragged_dimensions) <= set(contracted) else 1
    inner = math.prod(lhs[axis] for axis in contracted)
    return 2 * math.prod(eqn.outvars[0].aval.shape) * inner // shared


def _of_convolution(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // features


_FLOPS = {
    "dot_general": _of_matmul,
    "ragged_dot_general": _of_ragged,
    "conv_general_dilated": _of_convolution,
}
