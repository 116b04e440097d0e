"""A scan over layers whose backward pass updates each layer as soon as its gradient exists.

JAX's own transposed scan would do with a `custom_vjp` on each layer. But it writes cotangents into
a new stack, so old and new weights and states would be in memory at once. The backward loop here
carries one stack. Each iteration reads a layer, updates it, and writes it back in its place.

The forward pass is a `lax.scan`. A residual that is an array of the layer itself, or of `xs`, is
not stacked again. The backward loop reads it from where it is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, PyTree
from jaxfp8.optim._operands import (
    Operands,
    chosen,
    floats,
    has_float,
    instantiated,
    merged,
    placed,
    split,
)
from jaxfp8.optim._release_guards import check_use, of_one_batch, once, unless_broken
from jaxfp8.sharding._amax import vary_as
from jaxfp8.state._uses import Use

Body = Callable[..., tuple[PyTree, PyTree]]
Update = Callable[[list[Array], list[Array]], list[Array]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """How the backward loop finds the residuals of a layer. It is static.

    Attributes:
      flags: for each operand, whether it has a gradient.
      treedef: of the function that `jax.vjp` returned.
      sources: for each of its residuals ("kept", i), ("constant", i), or (field of Operands, i).
    """

    flags: Operands
    treedef: Any
    sources: list[tuple[str, int]]


def release_scan(
    body: Body, update: Update, operands: Operands, state: list[Array], seal: Array
) -> tuple[list[Array], list[Array]]:
    """`lax.scan` of `body` over layers, with an update of each layer in the backward pass.

    Args:
      body: `body(carry, params, xs, consts) -> (carry, ys)` for one layer. All are lists.
      update: `update(grads, params + state) -> params + state` for one layer.
      operands: what body gets.
      state: the carriers of the optimizer state, [L, ...] each.
      seal: of `Released`. If it is broken, the carry becomes NaN.

    Returns:
      The last carry, and ys. The cotangents of params and of state are their next values.
    """

    @jax.custom_vjp
    def run(operands: Operands, state: list[Array], seal: Array) -> Any:
        carry, params, xs, consts = operands

        def one(carry: Any, of_layer: Any) -> Any:
            return body(carry, *of_layer, consts)

        return lax.scan(one, unless_broken(carry, seal), (params, xs))

    use = Use.of(seal)

    def forward_rule(operands: Operands, state: Any, seal: Any) -> Any:
        flags = Operands(*[[leaf.perturbed for leaf in leaves] for leaves in operands])
        check_use(use, [*flags.params, *(leaf.perturbed for leaf in [*state, seal])])
        operands, state, seal = jax.tree.map(
            lambda leaf: leaf.value, (operands, state, seal), is_leaf=_is_primal
        )
        return _forward(body, operands, flags, state, seal)

    def backward_rule(saved: Any, cotangents: Any) -> Any:
        return _backward(update, *saved, *cotangents)

    run.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return run(operands, state, seal)


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def _forward(
    body: Body, operands: Operands, perturbed: Operands, state: list[Array], seal: Array
) -> Any:
    """The results, and what the backward loop needs."""
    carry, params, xs, consts = operands
    # A carry without a gradient has one after the first layer.
    flags = perturbed._replace(carry=[has_float(x) for x in carry])
    plan: list[Any] = []

    def one(carry: list[Array], of_layer: Any) -> Any:
        layer = Operands(carry, of_layer[0], of_layer[1], consts)

        def of_differentiated(*differentiated: Array) -> Any:
            carry, ys = body(*merged(layer, flags, differentiated))
            outs = (floats(carry), floats(ys))
            return outs, (carry, ys)

        _, backward, outs = jax.vjp(of_differentiated, *chosen(layer, flags), has_aux=True)
        residuals, treedef = jax.tree.flatten(backward)
        kept, constants, sources = _sort(residuals, layer)
        plan[:] = [_Plan(flags, treedef, sources), constants]
        return outs[0], (outs[1], kept)

    carry, (ys, kept) = lax.scan(one, unless_broken(carry, seal), (params, xs))
    return (carry, ys), (operands._replace(carry=[]), state, seal, kept, perturbed, *plan)


def _sort(residuals: list[Any], layer: Operands) -> Any:
    """The residuals of a layer to be stacked, those that are constants, and where each one is."""
    known = {
        id(x): (field, i)
        for field in ("params", "xs", "consts")
        for i, x in enumerate(getattr(layer, field))
    }
    traced = any(isinstance(x, jax.core.Tracer) for x in layer.params)
    kept: list[Any] = []
    constants: list[Any] = []
    sources = []
    for x in residuals:
        if id(x) not in known:
            is_constant = traced and not isinstance(x, jax.core.Tracer)
            name, found = ("constant", constants) if is_constant else ("kept", kept)
            known[id(x)] = (name, len(found))
            found.append(x)
        sources.append(known[id(x)])
    return kept, constants, sources


def _backward(
    update: Update,
    operands: Operands,
    state: list[Array],
    seal: Array,
    kept: list[Array],
    perturbed: Any,
    plan: _Plan,
    constants: list[Any],
    d_carry: list[Any],
    d_ys: list[Any],
) -> Any:
    """The cotangents of Operands, of the state and of the seal."""
    d_carry, d_ys = once(instantiated(d_carry)), once(instantiated(d_ys))
    flags, updates = plan.flags, any(plan.flags.params)
    layers = (operands.params + state) if updates else operands.params
    number = jnp.shape(operands.params[0])[0]

    def one(loop: Any, of_layer: Any) -> Any:
        d_carry, d_consts, stacks = loop
        index, xs, kept, d_ys = of_layer
        layer = [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in stacks]
        params = layer[: len(operands.params)]
        found = {
            "params": params, "xs": xs, "consts": operands.consts, "kept": kept,
            "constant": constants,
        }  # fmt: skip
        residuals = [found[name][i] for name, i in plan.sources]
        grads = jax.tree.unflatten(plan.treedef, residuals)((d_carry, d_ys))
        d_layer = split(flags, grads)
        d_consts = [jnp.add(*both) for both in zip(d_consts, d_layer.consts, strict=True)]
        if updates:
            new = update(d_layer.params, layer)
            stacks = [
                lax.dynamic_update_index_in_dim(stack, x, index, axis=0)
                for stack, x in zip(stacks, new, strict=True)
            ]
        return (d_layer.carry, d_consts, stacks), d_layer.xs

    d_consts = [
        vary_as(jnp.zeros_like(x), x)
        for x, flag in zip(operands.consts, flags.consts, strict=True)
        if flag
    ]
    loop = (d_carry, d_consts, layers)
    of_layers = (jnp.arange(number), operands.xs, kept, d_ys)
    (d_carry, d_consts, layers), d_xs = lax.scan(one, loop, of_layers, reverse=True)
    d_params = layers[: len(operands.params)] if updates else []
    d_state = layers[len(operands.params) :] if updates else [None] * len(state)
    d_operands = Operands(
        *[
            placed(values, where)
            for values, where in zip((d_carry, d_params, d_xs, d_consts), flags, strict=True)
        ]
    )
    return d_operands, d_state, of_one_batch(seal, d_params) if updates else None
