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
from jaxfp8.optim._released import is_float, is_sealed
from jaxfp8.sharding._amax import vary_as, varying_axes_of_type
from jaxfp8.state._gradient_channel import Use

# The arrays that the loop of released layers differentiates, and which of them have a gradient.


class Operands(NamedTuple):
    """What the loop differentiates, as lists of arrays: [L, ...] but for `carry` and `consts`."""

    carry: list[Any]
    params: list[Any]
    xs: list[Any]
    consts: list[Any]


def _has_float(x: Any) -> bool:
    """Whether an array has floats."""
    return is_float(jnp.result_type(x))


def _chosen(layer: Operands, flags: Operands) -> list[Any]:
    """The arrays with a gradient."""
    pairs = (zip(xs, fs, strict=True) for xs, fs in zip(layer, flags, strict=True))
    return [x for pair in pairs for x, flag in pair if flag]


def _merged(layer: Operands, flags: Operands, differentiated: tuple[Array, ...]) -> Operands:
    """A layer with other arrays in the place of those with a gradient."""
    new = _split(flags, differentiated)
    return Operands(
        *[
            [x if y is None else y for x, y in zip(old, _placed(values, fs), strict=True)]
            for old, values, fs in zip(layer, new, flags, strict=True)
        ]
    )


def _split(flags: Operands, values: Any) -> Operands:
    """The inverse of `_chosen`, without the arrays that have no gradient."""
    left = iter(values)
    return Operands(*[[next(left) for flag in fs if flag] for fs in flags])


def _placed(values: list[Any], flags: list[bool]) -> list[Any]:
    """The values where a flag is set, and None elsewhere."""
    left = iter(values)
    return [next(left) if flag else None for flag in flags]


def _floats(leaves: list[Any]) -> list[Any]:
    """The arrays of floats."""
    return [x for x in leaves if _has_float(x)]


def _instantiated(cotangents: list[Any]) -> list[Array]:
    """The cotangents of floats. JAX gives symbolic zeros for those that are not used."""

    def one(x: Any) -> Array:
        if not isinstance(x, jax.custom_derivatives.SymbolicZero):
            return x
        aval: Any = x.aval
        zeros = jnp.zeros(aval.shape, aval.dtype)
        axes = tuple(sorted(varying_axes_of_type(aval)))
        return lax.pcast(zeros, axes, to="varying") if axes else zeros

    return [one(x) for x in cotangents if is_float(_dtype_of(x))]


def _dtype_of(cotangent: Any) -> Any:
    return getattr(cotangent, "aval", cotangent).dtype


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


def _unless_broken(carry: list[Array], seal: Array) -> list[Array]:
    """The carry, or NaN in its floats if arithmetic changed the Released."""
    # A product with a scalar keeps the sharding of x on an Explicit mesh.
    factor = jnp.where(is_sealed(seal), 1.0, jnp.nan)
    return [x * factor.astype(x.dtype) if _has_float(x) else x for x in carry]


@custom_vmap
def _of_one_batch(seal: Array, params: list[Array]) -> Array:
    """The seal. It raises an error under `jax.vmap` if the next parameters are mapped alone."""
    return seal


@_of_one_batch.def_vmap
def _(size: int, mapped: Any, seal: Array, params: list[Array]) -> tuple[Array, bool]:
    if any(mapped[1]) and not mapped[0]:
        raise ValueError(
            f"jax.vmap maps {size} examples over one Released. Each example would update the "
            "layers. Map examples inside of f, as in stack.scan(lambda x, p: (jax.vmap(layer, "
            "(0, None))(x, p), None), ...). For an ensemble, map the Released too."
        )
    return seal, mapped[0]


@jax.custom_jvp
def _once(cotangents: list[Array]) -> list[Array]:
    """The cotangents, which cannot be differentiated."""
    return cotangents


@_once.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "a loss with a Released is differentiated twice. Its gradient is the next Released, which "
        "has no derivative. Where one is needed, use jax.lax.scan over Released.params."
    )


# A scan over layers whose backward pass updates each layer as soon as its gradient exists.

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

    `state` has the carriers of the optimizer state, [L, ...] each. If the seal of `Released` is
    broken, the carry becomes NaN. Returned are the last carry, and ys. The cotangents of params and
    of state are their next values.
    """

    @jax.custom_vjp
    def run(operands: Operands, state: list[Array], seal: Array) -> Any:
        carry, params, xs, consts = operands

        def one(carry: Any, of_layer: Any) -> Any:
            return body(carry, *of_layer, consts)

        return lax.scan(one, _unless_broken(carry, seal), (params, xs))

    use = Use.of(seal)

    def forward_rule(operands: Operands, state: Any, seal: Any) -> Any:
        flags = Operands(*[[leaf.perturbed for leaf in leaves] for leaves in operands])
        _check_use(use, [*flags.params, *(leaf.perturbed for leaf in [*state, seal])])
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
    flags = perturbed._replace(carry=[_has_float(x) for x in carry])
    plan: list[Any] = []

    def one(carry: list[Array], of_layer: Any) -> Any:
        layer = Operands(carry, of_layer[0], of_layer[1], consts)

        def of_differentiated(*differentiated: Array) -> Any:
            carry, ys = body(*_merged(layer, flags, differentiated))
            outs = (_floats(carry), _floats(ys))
            return outs, (carry, ys)

        _, backward, outs = jax.vjp(of_differentiated, *_chosen(layer, flags), has_aux=True)
        residuals, treedef = jax.tree.flatten(backward)
        kept, constants, sources = _sort(residuals, layer)
        plan[:] = [_Plan(flags, treedef, sources), constants]
        return outs[0], (outs[1], kept)

    carry, (ys, kept) = lax.scan(one, _unless_broken(carry, seal), (params, xs))
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
    d_carry, d_ys = _once(_instantiated(d_carry)), _once(_instantiated(d_ys))
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
        d_layer = _split(flags, grads)
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
            _placed(values, where)
            for values, where in zip((d_carry, d_params, d_xs, d_consts), flags, strict=True)
        ]
    )
    return d_operands, d_state, _of_one_batch(seal, d_params) if updates else None
