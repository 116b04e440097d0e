"""Operands of one grouped matmul of each kind, and sizes of groups, for the tests of kernels."""

import functools

import jax
import jax.numpy as jnp

import jaxfp8 as fp8
from jaxfp8._geometry import Geometry
from jaxfp8.kernels.grouped_matmul._groups import Groups

GEOMETRY = {
    "fprop": Geometry.of((((1,), (0,)), ((), ())), 2, 2),
    "dgrad": Geometry.of((((1,), (1,)), ((), ())), 2, 2),
    "wgrad": Geometry.of((((0,), (0,)), ((), ())), 2, 2),
}
RECIPES = {
    "blockwise": fp8.recipes.blockwise(),
    "float32_scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8_square": fp8.recipes.mxfp8(w_tile_dim=2),
    "rowwise": fp8.recipes.rowwise(),
    "current": fp8.recipes.current(),
}
SIZES = {
    "ragged": ([1, 0, 127, 130], 270),
    "one": ([140], 140),
    "none": ([0, 0], 9),
    "all in the last": ([0, 0, 200], 200),
}


def quantized(stack, quantizer, kept):
    rule, granularity = quantizer.rule, quantizer.granularity.for_matmul(kept, 2)
    one = functools.partial(
        fp8.quantize, format=quantizer.value_format, granularity=granularity,
        power_of_two=rule.power_of_two, scale_format=rule.scale_format,
    )  # fmt: skip
    return jax.vmap(one)(stack)


def shared_by_group(stack, groups, kept):
    """Tiles of one group with one scale for all of its rows, as `ragged_dot` makes them."""
    shared = groups.tile == 1 and stack.granularity.in_one
    if stack.granularity.in_tiles or (kept == (0,) and not shared):
        return stack
    of_groups = groups.largest(stack.scale)
    scale = groups.of_tiles(of_groups)
    return jax.tree.map(lambda leaf: leaf, stack).__class__(
        stack.values, scale, stack.granularity, stack.dtype, stack.power_of_two
    )


def operands(matmul, recipe, sizes, tokens, k, n, *, tile=128):
    keys = jax.random.split(jax.random.key(1), 3)
    x, g = (
        jax.random.normal(key, (tokens, size)) for key, size in zip(keys[:2], (k, n), strict=True)
    )
    w, sizes = jax.random.normal(keys[2], (len(sizes), k, n)) * 0.1, jnp.asarray(sizes)
    tail = jnp.arange(tokens)[:, None] >= jnp.sum(sizes)
    x, g = (jnp.where(tail, jnp.nan, each) for each in (x, g))
    groups = Groups.of(sizes, tokens=tokens, tile=tile)
    x, g = groups.tiled(x), groups.tiled(g)
    given = getattr(recipe, matmul)
    stacks = {"fprop": (x, w), "dgrad": (g, w), "wgrad": (x, g)}[matmul]
    kept = {"fprop": ((0,), (1,)), "dgrad": ((0,), (0,)), "wgrad": ((1,), (1,))}[matmul]
    made = [
        quantized(stack, quantizer, axes)
        for stack, quantizer, axes in zip(stacks, (given.lhs, given.rhs), kept, strict=True)
    ]
    made[0] = shared_by_group(made[0], groups, kept[0])
    if matmul == "wgrad":
        made[1] = shared_by_group(made[1], groups, kept[1])
    return (*made, groups)
