"""The dense layers of a transformer block, forward and backward with casts, in every recipe.

The baseline is bfloat16. Two rivals stand beside the recipes, see `rivals.py`. One program has all
layers. It computes y, the gradients of x and w, and the next state of the quantizers. Each layer
has its own x and its own gradient of y, so nothing between the layers is timed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import rivals
from case import Case
from rivals import Library
from target import Target

import jaxfp8 as fp8

SECTION = "layers"
BASELINE = "bf16"
STEPS = 3
"""Steps before the timed ones, so that no scale is unset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """The dense layers of a block.

    Attributes:
      name: its name in tables.
      tokens: rows of x.
      weights: [K, N] of each layer.
      source: where the sizes come from.
    """

    name: str
    tokens: int
    weights: tuple[tuple[int, int], ...]
    source: str


BLOCKS = (
    Block(
        name="Llama 3 8B",
        tokens=8192,
        weights=((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
        source="arXiv:2407.21783, table 3: width 4096, FFN 14336, 32 heads, 8 of them for keys and "
        "values; query, key and value in one matmul, gate and up projection in one; 8192 tokens",
    ),
    Block(
        name="5B",
        tokens=31 * 512,
        weights=((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)),
        source="NVIDIA TransformerEngine, docs/examples/gemm_profiling: width 4096, FFN 16384, "
        "31 sequences of 512 tokens",
    ),
)
TINY_BLOCKS = (
    Block(name="tiny", tokens=256, weights=((128, 256),), source="none, to try the program"),
)


RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, wgrad in bf16": fp8.recipes.rowwise(high_precision_wgrad=True),
    "mxfp8, weights 32x32": fp8.recipes.mxfp8(w_tile_dim=2),
    "static": fp8.recipes.static(x_scale=2.0**-6, w_scale=2.0**-6, g_scale=2.0**-13),
}
"""Recipes by name. The most important ones come first."""
ALONE = {"casts": "xla", "matmuls": "xla"}
PALLAS_CASTS = {"casts": "mosaic", "matmuls": "xla"}
PALLAS = {"casts": "mosaic", "matmuls": "mosaic"}
# Named kernels that are timed beside `fp8.Kernels(chip)`: their title, arguments, and recipes.
NAMED = (
    (
        "XLA alone",
        ALONE,
        ("delayed", "current", "blockwise", "mxfp8", "rowwise", "mxfp8, weights 32x32"),
    ),
    ("Pallas casts", PALLAS_CASTS, ("delayed", "current", "blockwise", "rowwise")),
    ("all in Pallas", PALLAS, ("delayed", "blockwise", "mxfp8", "rowwise")),
)


def contenders(chip: str) -> dict[str, Library]:
    """The baseline, recipes with the kernels that `fp8.Kernels(chip)` chooses, and rivals."""
    settled = rivals.ours(RECIPES["delayed"], chip, {}, settled=True)
    chosen = {name: rivals.ours(recipe, chip, {}) for name, recipe in RECIPES.items()}
    others = {rivals.FLAX: rivals.flax(), rivals.PLAIN: rivals.plain()}
    return {BASELINE: rivals.bf16(), "delayed, settled": settled, **chosen, **others}


def with_named_kernels(chip: str) -> dict[str, Library]:
    """The baseline, and recipes with named kernels."""
    by_name = {
        f"{name}, {what}": rivals.ours(RECIPES[name], chip, named)
        for what, named, names in NAMED
        for name in names
    }
    return {BASELINE: rivals.bf16(), **by_name}


def step(library: Library) -> Callable[..., Any]:
    """`step(params, c, state) -> (y, gradients, state)`.

    `params` has (x, w) of each layer. `c` has the gradient of y of each layer.
    """

    def run(params: Any, c: Any, state: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            y = [library.dot(x, w, s) for (x, w), s in zip(params, state, strict=True)]
            return weighted(y, c), y

        # The loss is not returned, so XLA does not compute it. The gradient of y is c.
        (_, y), gradients, state = library.value_and_grad(loss, has_aux=True)(params, state)
        return y, gradients, state

    return run


def weighted(y: list[jax.Array], c: list[jax.Array]) -> jax.Array:
    """The sum of y * c, whose gradient is c."""
    return sum(
        (jnp.sum((a * b).astype(jnp.float32)) for a, b in zip(y, c, strict=True)), jnp.float32(0.0)
    )


def cases(blocks: tuple[Block, ...], target: Target) -> Iterator[Case]:
    # Named kernels are compared with a baseline of their own. So the more important contenders of
    # all blocks come first, and a short run has them.
    for libraries in (contenders(target.chip), with_named_kernels(target.chip)):
        for block in blocks:
            yield from one_block(block, target.chip, libraries)


def one_block(block: Block, chip: str, libraries: dict[str, Library]) -> Iterator[Case]:
    params = [(_array(block.tokens, k), _array(k, n)) for k, n in block.weights]
    c = [_array(block.tokens, n) for _, n in block.weights]
    case = functools.partial(
        Case, section=SECTION, group=block.name, operation="forward and backward", looped=False,
        flops=6 * block.tokens * sum(k * n for k, n in block.weights),
    )  # fmt: skip
    for name, library in libraries.items():
        one = jax.eval_shape(library.state)
        arguments = params, c, [one] * len(block.weights)
        yield case(
            contender=name,
            named=library.named,
            function=step(library),
            arguments=arguments,
            inputs=functools.partial(steady, arguments, library),
            options=library.options(chip),
        )


def steady(arguments: Any, library: Library, program: Any, known: Any) -> Any:
    """Values of the arguments, with the quantizer state after some steps.

    `known` makes random arrays.
    """
    params, c, _ = known.of(arguments)
    state = [library.state() for _ in params]
    for _ in range(STEPS):
        state = program(params, c, state)[2]
    return params, c, state


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
