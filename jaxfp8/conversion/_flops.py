"""Operations of the matmuls and convolutions of a traced function, by layer."""

import math
from collections import Counter
from typing import Any

import jax

_MARK = "jaxfp8.layer:"
_END = ":"
OTHER = "(no layer)"
"""The key of operations outside of layers. A model that is a layer has the path ""."""


def layer_scope(path: str) -> Any:
    """A context that marks the operations of a layer."""
    return jax.named_scope(f"{_MARK}{path.replace('/', _END)}{_END}")


def flops_of(jaxpr: Any) -> Counter[str]:
    """Operations by path of a layer. `OTHER` has those outside of layers.

    A scan counts as often as its length, a branch as its largest one, and a `while` once.

    Args:
      jaxpr: from `jax.make_jaxpr`.

    Example:
      >>> import jax.numpy as jnp
      >>> def f(x):
      ...     with layer_scope("block/up"):
      ...         return x @ jnp.ones((4, 16))
      >>> flops_of(jax.make_jaxpr(f)(jnp.ones((8, 4))).jaxpr)
      Counter({'block/up': 1024})
    """
    found: Counter[str] = Counter()
    _count(jaxpr, 1, "", found)
    return found


def in_loops(jaxpr: Any, times: int = 1, outer: str = "") -> frozenset[str]:
    """The paths of layers that a loop runs more than once.

    Example:
      >>> import jax.numpy as jnp
      >>> def body(x, w):
      ...     with layer_scope("up"):
      ...         return x @ w, None
      >>> f = lambda x, ws: jax.lax.scan(body, x, ws)
      >>> in_loops(jax.make_jaxpr(f)(jnp.ones((8, 4)), jnp.ones((3, 4, 4))).jaxpr)
      frozenset({'up'})
    """
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        names = f"{outer}/{eqn.source_info.name_stack}"
        if times > 1 and eqn.primitive.name in _FLOPS:
            found.add(_path(names))
        again = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= in_loops(inner, again, names)
    return frozenset(found - {OTHER})


def _count(jaxpr: Any, times: int, outer: str, found: Counter[str]) -> None:
    for eqn in jaxpr.eqns:
        names = f"{outer}/{eqn.source_info.name_stack}"
        if flops := _FLOPS.get(eqn.primitive.name, _none)(eqn):
            found[_path(names)] += times * flops
        inner_times = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        if eqn.primitive.name == "cond":
            branches = [Counter[str]() for _ in eqn.params["branches"]]
            for branch, counter in zip(eqn.params["branches"], branches, strict=True):
                _count(branch.jaxpr, inner_times, names, counter)
            found.update(max(branches, key=lambda branch: sum(branch.values())))
            continue
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                _count(inner, inner_times, names, found)


def _path(names: str) -> str:
    """The layer in whose scope an operation is."""
    if _MARK not in names:
        return OTHER
    marked = names.rsplit(_MARK, 1)[1]
    return marked[: marked.rindex(_END)].replace(_END, "/")


def _none(eqn: Any) -> int:
    del eqn
    return 0


def _of_matmul(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracted)


def _of_convolution(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // features


_FLOPS = {"dot_general": _of_matmul, "conv_general_dilated": _of_convolution}
