"""Layers of experts, forward and backward with casts, in every recipe.

The program computes y and the gradients of x and w. The numbers of tokens of the experts are
uneven, and an input on the device. The baseline has it as easy as can be: in bfloat16, with the
same number of tokens for each expert, so that one batched matmul does all of them. The plain
pattern has both. flax has no layer of experts in FP8.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rivals
from case import Case
from checks import BFLOAT16_ROUNDING, GPU_BOUND, Check, near, on
from jax import lax
from layers import ALONE, PALLAS, RECIPES
from rivals import bf16_options
from target import Target

import jaxfp8 as fp8

SECTION = "experts"
IN_A_BATCH, RAGGED = "equal sizes in a batch", "jax.lax.ragged_dot"
BASELINE = f"bf16, {IN_A_BATCH}"
MOST_DENSE_BYTES = 2**34
"""The most bytes of [E, T, K] in bfloat16, for which `jax.lax.ragged_dot` is timed.

For GPUs XLA makes such an array of every operand that has tokens.
"""
SEED, UNEVEN = 0, 4.0  # of Dirichlet's distribution: one expert in six has twice its share, or half


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Experts of one matmul. `average` is the mean number of tokens of an expert."""

    experts: int
    average: int
    k: int
    n: int

    @property
    def tokens(self) -> int:
        return self.experts * self.average

    @property
    def name(self) -> str:
        return f"{self.experts} experts of {self.average}x{self.k}x{self.n}"


# Few wide experts, many narrow ones, and DeepSeek-V3's (width 7168, experts of 2048; arXiv
# 2412.19437, section 4.2), 64 of 256 on a device.
LAYERS = (
    Layer(experts=8, average=4096, k=4096, n=2048),
    Layer(experts=64, average=512, k=2048, n=1024),
    Layer(experts=64, average=1024, k=7168, n=2048),
)
TINY_LAYERS = (Layer(experts=4, average=40, k=128, n=256),)
CHECKED = (
    Layer(experts=5, average=200, k=384, n=256),
    Layer(experts=40, average=24, k=256, n=128),
)
TINY_CHECKED = (Layer(experts=5, average=20, k=64, n=32),)
NAMES = ("current", "rowwise", "blockwise", "mxfp8")
NAMED = (("XLA alone", ALONE, NAMES[::2]), ("all in Pallas", PALLAS, ("current", "rowwise")))


def sizes_of(layer: Layer, *, tail: int = 0, seed: int = SEED) -> np.ndarray:
    """Uneven numbers of tokens of the experts, whose sum is all tokens but `tail`."""
    random = np.random.default_rng(seed)
    shares = random.dirichlet(np.full(layer.experts, UNEVEN))
    return random.multinomial(layer.tokens - tail, shares).astype(np.int32)


def forward_and_backward(matmul: Callable[..., jax.Array]) -> Callable[..., Any]:
    """`run(x, w, g, sizes) -> y, dx, dw`."""

    def run(x: Any, w: Any, g: Any, sizes: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: matmul(x, w, sizes), x, w)
        return y, *pull(g)

    return run


def in_a_batch(product: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The product of equal numbers of rows with each matrix, whatever the sizes are.

    `product` takes x [E, T / E, K] and w [E, K, N].
    """

    def matmul(x: Any, w: Any, sizes: Any) -> jax.Array:
        del sizes
        return product(x.reshape(len(w), -1, x.shape[1]), w).reshape(len(x), -1)

    return forward_and_backward(matmul)


def by(recipe: fp8.Recipe, chip: str, **named: str) -> Callable[..., Any]:
    def matmul(x: Any, w: Any, sizes: Any) -> jax.Array:
        return fp8.ragged_dot(x, w, sizes, recipe=recipe, kernels=fp8.Kernels(chip, **named))

    return forward_and_backward(matmul)


def by_dot(recipe: fp8.Recipe, chip: str) -> Callable[..., Any]:
    return in_a_batch(
        jax.vmap(lambda x, w: fp8.dot(x, w, recipe=recipe, kernels=fp8.Kernels(chip)))
    )


def cases(layers: tuple[Layer, ...], target: Target) -> Iterator[Case]:
    for layer in layers:
        yield from one_layer(layer, target.chip)


def one_layer(layer: Layer, chip: str) -> Iterator[Case]:
    case = functools.partial(a_case, layer)
    batched = jax.vmap(jnp.dot)
    by_xla = functools.partial(case, options=bf16_options(chip))
    yield by_xla(contender=BASELINE, function=in_a_batch(batched))
    # One scale for all experts. With one for each, XLA finds no FP8 matmul in the pattern.
    by_hand = in_a_batch(rivals.plain_product(batched))
    yield by_xla(contender=f"{rivals.PLAIN}, {IN_A_BATCH}", function=by_hand)
    if 2 * layer.experts * layer.tokens * layer.k <= MOST_DENSE_BYTES:
        products = {"bf16": lax.ragged_dot, rivals.PLAIN: rivals.plain_product(lax.ragged_dot)}
        for name, product in products.items():
            yield by_xla(contender=f"{name}, {RAGGED}", function=forward_and_backward(product))
    for name in NAMES:
        yield from one_recipe(layer, name, chip)
        options = fp8.Kernels(chip).compiler_options(RECIPES[name])
        yield case(
            contender=f"{name}, {IN_A_BATCH}",
            function=by_dot(RECIPES[name], chip),
            options=options,
        )


def a_case(layer: Layer, **fields: Any) -> Case:
    return Case(
        section=SECTION,
        group=layer.name,
        operation="forward and backward",
        arguments=arguments(layer),
        flops=6 * layer.tokens * layer.k * layer.n,
        looped=False,
        inputs=functools.partial(inputs, layer),
        **fields,
    )


def one_recipe(layer: Layer, name: str, chip: str) -> Iterator[Case]:
    recipe = RECIPES[name]
    case = functools.partial(a_case, layer, options=fp8.Kernels(chip).compiler_options(recipe))
    yield case(contender=name, function=by(recipe, chip))
    for what, named, names in NAMED:
        if name in names:
            function = by(recipe, chip, **named)
            yield case(contender=f"{name}, {what}", named=named, function=function)


def checks(target: Target, *, tiny: bool, reference: Any) -> Iterator[Check]:
    """The results of every recipe and backend, beside those of the reference device."""
    for layer, name in itertools.product(TINY_CHECKED if tiny else CHECKED, NAMES):
        wanted = functools.partial(on_reference, layer, RECIPES[name], reference)
        for made in one_recipe(layer, name, target.chip):
            case = dataclasses.replace(made, section="checks", flops=0, inputs=None)
            yield Check(
                case=case, arguments=functools.partial(hard, layer), wanted=wanted, verdict=verdict
            )


def on_reference(layer: Layer, recipe: fp8.Recipe, device: Any, number: int) -> Any:
    run = forward_and_backward(functools.partial(fp8.ragged_dot, recipe=recipe))
    return on(device, run, hard(layer, number))


def hard(layer: Layer, number: int) -> Any:
    """Inputs of a run. In the second one some rows belong to no expert, and hold NaN."""
    random, *floats = np.random.default_rng(number), *arguments(layer)[:3]
    x, w, g = (random.standard_normal(each.shape).astype(each.dtype) for each in floats)
    sizes = sizes_of(layer, tail=7 * number, seed=number)
    sizes[-1], sizes[0] = 0, sizes[0] + sizes[-1]
    for rows in (x, g):
        rows[sizes.sum() :] = np.nan
    return x, w, g, sizes


def verdict(wanted: Any, results: Any) -> dict[str, Any]:
    """The largest distance of y, dx and dw. What is 0 for the reference must be 0.

    Payloads are the same, and products are added in another order. Both results are rounded.
    """
    bound = GPU_BOUND + 2 * BFLOAT16_ROUNDING * (1 + GPU_BOUND)
    found = []
    for expected, result in zip(wanted, results, strict=True):
        found.append(near(bound, expected.astype(np.float64), result))
        rows = ~expected.any(-1)
        if result[rows].any():
            found.append(found[-1] | {"error": "rows of no expert, or an empty expert, are not 0"})
    return max(found, key=lambda each: ("error" in each, each["distance"]))


def arguments(layer: Layer, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of x, w, the gradient of y, and the sizes."""
    shapes = (layer.tokens, layer.k), (layer.experts, layer.k, layer.n), (layer.tokens, layer.n)
    floats = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return *floats, jax.ShapeDtypeStruct((layer.experts,), jnp.int32)


def inputs(layer: Layer, program: Any, known: Any) -> Any:
    """Values of the arguments. `known` makes random arrays."""
    del program
    *floats, _ = arguments(layer)
    return *known.of(tuple(floats)), jax.device_put(sizes_of(layer), known.device)
