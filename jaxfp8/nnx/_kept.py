"""An error for quantizer state that a compiled function computes and then drops.

Modules of nnx are pytrees, so `jax.jit` takes a model and gives its function a copy. An update of
the copy is lost, unless the function returns it. While jax traces the function, it does not know
yet what the function will return. The finished program shows it:

- `kept` marks an update with an operation of its own.
- jax removes each operation of the finished program whose results are not used.
- A mark that jax would remove becomes an operation that cannot be compiled.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.state._state import is_state

_kept_p = Primitive("fp8_kept")  # the identity
_kept_p.multiple_results = True
_lost_p = Primitive("fp8_lost")  # replaces a mark whose results are not used
_lost_p.multiple_results = True


def kept(states: PyTree, call: str) -> PyTree:
    """Return the same states, marked. A compiled function that drops all their histories raises.

    Only histories count, because an evaluation after the step reads scales. Frozen states do not
    count, because no update changes them.

    Args:
      states: the states that a commit returned.
      call: name of the function that committed, for the message.

    Raises:
      FP8StateError: when jax compiles the function, not when this function is called.
    """
    nodes, structure = jax.tree.flatten(states, is_leaf=is_state)
    learning = [i for i, node in enumerate(nodes) if is_state(node) and not node.frozen]
    histories = [nodes[i].amax_history for i in learning]
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in histories):
        return states  # nothing is traced, so nothing can be dropped by a compiled function
    for i, history in zip(learning, _kept_p.bind(*histories, call=call), strict=True):
        nodes[i] = dataclasses.replace(nodes[i], amax_history=history)
    return jax.tree.unflatten(structure, nodes)


def _keep_or_mark_as_lost(used: list[bool], *arguments: Any) -> tuple[list[bool], Any]:
    eqn = arguments[-1]  # newer jax passes one more argument before the equation
    if any(used):
        return [True] * len(eqn.invars), eqn
    return [False] * len(eqn.invars), eqn.replace(primitive=_lost_p, invars=[], outvars=[])


def _refuse(*_: Any, call: str) -> Sequence[Any]:
    raise FP8StateError(
        f"{call} updated the quantizer state of a model inside a function that jax compiles. The "
        "function does not return the update, so it would be lost. jax.jit and other "
        "transformations of jax give the function a copy of the model. Use the transformations of "
        "nnx (nnx.jit), or return the model or nnx.state(model). Or use "
        "value_and_grad(..., commit=False), return the amaxes that were seen, and call "
        "fp8.nnx.commit(model, seen) outside."
    )


_kept_p.def_impl(lambda *leaves, call: list(leaves))
_kept_p.def_abstract_eval(lambda *leaves, call: list(leaves))
mlir.register_lowering(_kept_p, lambda ctx, *leaves, call: list(leaves))
batching.primitive_batchers[_kept_p] = lambda leaves, axes, call: (
    _kept_p.bind(*leaves, call=call),
    axes,
)
partial_eval.dce_rules[_kept_p] = _keep_or_mark_as_lost

_lost_p.def_impl(_refuse)
_lost_p.def_abstract_eval(lambda *, call: [])
mlir.register_lowering(_lost_p, _refuse)
# It has no results. Without this rule a later dead-code pass would remove it, and the error too.
partial_eval.dce_rules[_lost_p] = lambda used, *arguments: ([], arguments[-1])
