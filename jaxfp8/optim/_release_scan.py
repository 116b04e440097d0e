"""The backward pass of released layers: a scan that updates, its operands and its guards.

JAX's own transposed scan would do with a `custom_vjp` on each layer. But it writes cotangents into
a new stack, so old and new weights and states would be in memory at once. The backward loop here
carries one stack. Each iteration reads a layer, updates it, and writes it back in its place.

The forward pass is a `lax.scan`. A residual that is an array of the layer itself, or of `xs`, is
not stacked again. The backward loop reads it from where it is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxfp8._typing import Array, PyTree
from jaxfp8.numerics._rounding import undifferentiable
from jaxfp8.optim._released import is_sealed
from jaxfp8.optim._weights import is_float
from jaxfp8.sharding._amax import vary_as, vary_over, varying_axes_of_type
from jaxfp8.state._gradient_channel import Use

# The arrays that the loop of released layers differentiates, and which of them have a gradient.


class Operands(NamedTuple):
    """What the loop differentiates, as trees of arrays: [L, ...] but for `carry` and `consts`."""

    carry: Any
    params: Any
    xs: Any
    consts: Any


def _chosen(flags: PyTree, tree: PyTree) -> PyTree:
    """The leaves whose flag is set, and None in the place of others."""
    return jax.tree.map(lambda flag, x: x if flag else None, flags, tree)


def _merged(flags: PyTree, chosen: PyTree, tree: PyTree) -> PyTree:
    """A tree with chosen leaves in the place of those whose flag is set."""
    return jax.tree.map(lambda flag, new, x: new if flag else x, flags, chosen, tree)


def _floats(tree: PyTree) -> PyTree:
    """The arrays of floats, and None in the place of others."""
    return _chosen(jax.tree.map(is_float, tree), tree)


def _instantiated(cotangent: Any) -> Array | None:
    """A cotangent of floats as an array. JAX gives a symbolic zero for one that is not used."""
    aval = getattr(cotangent, "aval", cotangent)
    if not is_float(aval):
        return None
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    return vary_over(jnp.zeros(aval.shape, aval.dtype), varying_axes_of_type(aval))


# What finds a wrong use of a `Released`. JAX would add, scale or average the next parameters.


def _check_use(use: Use, perturbed: list[bool]) -> None:
    """Raise ValueError for a second use, or if a part of the Released is differentiated."""
    if not any(perturbed):
        return
    if not all(perturbed):
        raise ValueError(
            "a loss is differentiated with respect to a part of a Released. Its gradient is the "
            "next Released, so differentiate with respect to all of it, or to nothing of it."
        )
    if use.is_second():
        raise ValueError(
            "a Released is used by two scans of one loss. JAX would add the next parameters of "
            "both. Use tied layers without release: jax.lax.scan and one update after the backward "
            "pass. For a use that is not trained, pass jax.lax.stop_gradient(layers)."
        )


def _unless_broken(carry: PyTree, seal: Array) -> PyTree:
    """The carry, or NaN in its floats if arithmetic changed the Released."""
    # A product with a scalar keeps the sharding of x on an Explicit mesh.
    factor = jnp.where(is_sealed(seal), 1.0, jnp.nan)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype) if is_float(x) else x, carry)


@custom_vmap
def _of_one_batch(seal: Array, params: PyTree) -> Array:
    """The seal. It raises an error under `jax.vmap` if the next parameters are mapped alone."""
    return seal


@_of_one_batch.def_vmap
def _(size: int, mapped: Any, seal: Array, params: PyTree) -> tuple[Array, bool]:
    of_seal, of_params = mapped
    if any(jax.tree.leaves(of_params)) and not of_seal:
        raise ValueError(
            f"jax.vmap maps {size} examples over one Released. Each example would update the "
            "layers. Map examples inside of f, as in stack.scan(lambda x, p: (jax.vmap(layer, "
            "(0, None))(x, p), None), ...). For an ensemble, map the Released too."
        )
    return seal, of_seal


_once = undifferentiable(
    lambda _: ValueError(
        "a loss with a Released is differentiated twice. Its gradient is the next Released, which "
        "has no derivative. Where one is needed, use jax.lax.scan over Released.params."
    )
)


# A scan over layers whose backward pass updates each layer as soon as its gradient exists.

Body = Callable[..., tuple[PyTree, PyTree]]
Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """How the backward loop finds the residuals of a layer. It is static."""

    flags: Operands  # for each operand, whether it has a gradient
    treedef: Any  # of the function that `jax.vjp` returned
    sources: list[tuple[str, int]]  # of its residuals: ("kept", i), ("constant", i), ("layer", i)


def release_scan(
    body: Body, update: Update, operands: Operands, state: PyTree, seal: Array
) -> tuple[PyTree, PyTree]:
    """`lax.scan` of `body` over layers, with an update of each layer in the backward pass.

    `state` has the carriers of the optimizer state, [L, ...] each. If the seal of `Released` is
    broken, the carry becomes NaN. Returned are the last carry, and ys. The cotangents of params and
    of state are their next values.
    """

    @jax.custom_vjp
    def run(operands: Operands, state: PyTree, seal: Array) -> Any:
        carry, params, xs, consts = operands

        def one(carry: Any, of_layer: Any) -> Any:
            return body(carry, *of_layer, consts)

        return lax.scan(one, _unless_broken(carry, seal), (params, xs))

    use = Use.of(seal)

    def forward_rule(operands: Operands, state: Any, seal: Any) -> Any:
        given = (operands, state, seal)
        flags, *others = jax.tree.map(lambda leaf: leaf.perturbed, given)
        _check_use(use, jax.tree.leaves((flags.params, others)))
        return _forward(body, flags, *jax.tree.map(lambda leaf: leaf.value, given))

    def backward_rule(saved: Any, cotangents: Any) -> Any:
        return _backward(update, *saved, *_once(jax.tree.map(_instantiated, cotangents)))

    run.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return run(operands, state, seal)


def _forward(body: Body, flags: Operands, operands: Operands, state: PyTree, seal: Array) -> Any:
    """The results, and what the backward loop needs."""
    carry, stacked, stacked_xs, consts = operands
    # A carry without a gradient has one after the first layer.
    flags = flags._replace(carry=jax.tree.map(is_float, carry))
    plan: list[Any] = []

    def one(carry: PyTree, of_layer: Any) -> Any:
        params, xs = of_layer
        layer = Operands(carry, params, xs, consts)

        def of_differentiated(chosen: PyTree) -> Any:
            outs = body(*_merged(flags, chosen, layer))
            return _floats(outs), outs

        _, backward, (carry, ys) = jax.vjp(of_differentiated, _chosen(flags, layer), has_aux=True)
        residuals, treedef = jax.tree.flatten(backward)
        kept, constants, sources = _sort(residuals, jax.tree.leaves(layer[1:]))
        plan[:] = [_Plan(flags, treedef, sources), constants]
        return carry, (ys, kept)

    carry, (ys, kept) = lax.scan(one, _unless_broken(carry, seal), (stacked, stacked_xs))
    return (carry, ys), (operands._replace(carry=None), state, seal, kept, *plan)


def _sort(residuals: list[Any], of_layer: list[Any]) -> Any:
    """The residuals of a layer to be stacked, those that are constants, and where each one is."""
    known = {id(x): ("layer", i) for i, x in enumerate(of_layer)}
    traced = any(isinstance(x, jax.core.Tracer) for x in of_layer)
    kept: list[Any] = []
    constants: list[Any] = []
    for x in residuals:
        if id(x) not in known:
            is_constant = traced and not isinstance(x, jax.core.Tracer)
            name, found = ("constant", constants) if is_constant else ("kept", kept)
            known[id(x)] = (name, len(found))
            found.append(x)
    return kept, constants, [known[id(x)] for x in residuals]


def _backward(
    update: Update,
    operands: Operands,
    state: PyTree,
    seal: Array,
    kept: list[Array],
    plan: _Plan,
    constants: list[Any],
    d_carry: PyTree,
    d_ys: PyTree,
) -> Any:
    """The cotangents of Operands, of the state and of the seal."""
    updates = any(jax.tree.leaves(plan.flags.params))
    layers = (operands.params, state if updates else None)
    number = jnp.shape(jax.tree.leaves(layers)[0])[0]

    def one(loop: Any, of_layer: Any) -> Any:
        d_carry, d_consts, layers = loop
        index, xs, kept, d_ys = of_layer
        params, state = jax.tree.map(
            lambda stack: lax.dynamic_index_in_dim(stack, index, keepdims=False), layers
        )
        found = {
            "layer": jax.tree.leaves((params, xs, operands.consts)), "kept": kept,
            "constant": constants,
        }  # fmt: skip
        residuals = [found[name][i] for name, i in plan.sources]
        (d_layer,) = jax.tree.unflatten(plan.treedef, residuals)((d_carry, d_ys))
        d_consts = jax.tree.map(jnp.add, d_consts, d_layer.consts)
        if updates:
            layers = jax.tree.map(
                lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, index, axis=0),
                layers, update(d_layer.params, params, state),
            )  # fmt: skip
        return (d_layer.carry, d_consts, layers), d_layer.xs

    d_consts = jax.tree.map(
        lambda x: vary_as(jnp.zeros_like(x), x), _chosen(plan.flags.consts, operands.consts)
    )
    of_layers = (jnp.arange(number), operands.xs, kept, d_ys)
    (d_carry, d_consts, layers), d_xs = lax.scan(
        one, (d_carry, d_consts, layers), of_layers, reverse=True
    )
    if not updates:
        return Operands(d_carry, None, d_xs, d_consts), None, None
    params, state = layers
    return Operands(d_carry, params, d_xs, d_consts), state, _of_one_batch(seal, params)
