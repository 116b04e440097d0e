"""The table of the tests of GPU and TPU programs.

Recipes with kernels, functions of them, and checks of what their matmuls read.

A cell is one function with one recipe and kernels, compiled for one chip and run on the CPU by
`jaxfp8.programs.run_on_cpu`, which shows the operands of every matmul.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfp8 as fp8
from jaxfp8.quantizers import Current, Static


class Setup(NamedTuple):
    """What a function is given.

    Attributes:
      recipe: which quantizer for which operand.
      kernels: what casts and multiplies. XLA compiles all of it, since a Pallas kernel is no
        program that a CPU runs.
    """

    recipe: fp8.Recipe
    kernels: fp8.Kernels = fp8.Kernels()


# Blackwell's block-scaled matmuls of any size, and casts by XLA.
BLACKWELL = fp8.Kernels("b200", casts="xla", matmuls="cudnn")
IDENTITY = Setup(fp8.recipes.identity())
SETUPS = {
    "delayed": Setup(fp8.recipes.delayed()),
    "delayed, powers of two": Setup(fp8.recipes.delayed(power_of_two=True)),
    "current": Setup(fp8.recipes.current()),
    "static": Setup(fp8.recipes.static(x_scale=0.011, w_scale=0.0023, g_scale=1.1e-4)),
    "rowwise": Setup(fp8.recipes.rowwise()),
    "rowwise, wgrad in high precision": Setup(fp8.recipes.rowwise(high_precision_wgrad=True)),
    "blockwise": Setup(fp8.recipes.blockwise()),
    "blockwise, float32 scales": Setup(fp8.recipes.blockwise(power_of_two=False)),
    "blockwise, hybrid": Setup(fp8.recipes.blockwise(gradient=fp8.E5M2)),
    "mxfp8": Setup(fp8.recipes.mxfp8()),
    "mxfp8, w 32x32": Setup(fp8.recipes.mxfp8(w_tile_dim=2)),
    "mxfp8, by Blackwell": Setup(fp8.recipes.mxfp8(), BLACKWELL),
    "blockwise, by Blackwell": Setup(fp8.recipes.blockwise(), BLACKWELL),
}
CHIPS = ("h200", "b200", "a100")
# All different, so that the shape of an operand says which tensor it is; multiples of 128, so that
# nothing is padded.
M, K, N = 512, 256, 384
BITS = {fp8.E4M3: 4, fp8.E5M2: 3}  # of a significand


def arrays(dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [M, K], w [K, N] and the gradient of the product c [M, N], each with rows of unequal
    size.
    """
    random = np.random.default_rng(seed)

    def one(rows: int, columns: int, size: float) -> jax.Array:
        values = random.standard_normal((rows, columns)) * np.exp2(random.uniform(-2, 2, (rows, 1)))
        # Rounded to bfloat16 in any dtype: both see the same numbers.
        return jnp.asarray(size * values, jnp.bfloat16).astype(dtype)

    return one(M, K, 1.0), one(K, N, 0.2), one(M, N, 0.01)


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One matmul of a program, as it ran.

    Attributes:
      name: "fprop", "dgrad" or "wgrad".
      operands: lhs and rhs as the matmul read them.
      scales: those that it applied itself, or None.
    """

    name: str
    operands: tuple[np.ndarray, np.ndarray]
    scales: tuple[np.ndarray | None, np.ndarray | None]


class Matmuls(list[Matmul]):
    """The FP8 matmuls that a program ran, in the order in which they ran.

    Given to `run_on_cpu` as `seen=`.
    """

    def __call__(self, label: str, lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> None:
        found = re.search(r"jaxfp8\.(fprop|dgrad|wgrad)(?!\.high_precision)", label)
        if found:
            self.append(Matmul(found[1], (lhs, rhs), (lhs_scale, rhs_scale)))


def on_grid(operand: np.ndarray, format: fp8.numerics.Format) -> bool:
    """Whether every value lies on the grid of a format, times a scale.

    A power of two leaves the number of significant bits as it is. A float32 scale does not, but a
    tensor that has one scale has no more magnitudes than the format, which are fewer than 127.
    """
    if operand.dtype == format.dtype:
        return True
    magnitudes = np.unique(np.abs(operand.astype(np.float64)))
    significands = np.frexp(magnitudes)[0] * 2.0 ** BITS[format]
    return bool((significands == np.round(significands)).all()) or len(magnitudes) <= 127


def quantizers(recipe: fp8.Recipe, matmul: str) -> tuple[Any, Any]:
    operands = getattr(recipe, matmul)
    return operands.lhs, operands.rhs


def off_grid(recipe: fp8.Recipe, matmuls: Matmuls) -> list[str]:
    """Which operands are not in FP8."""
    return [
        f"{matmul.name} {side}"
        for matmul in matmuls
        for side, operand, quantizer in zip(
            ("lhs", "rhs"), matmul.operands, quantizers(recipe, matmul.name), strict=True
        )
        if not on_grid(operand, quantizer.value_format)
    ]


# What a matmul of 2D operands keeps of each: x [M, K], w [K, N], g [M, N].
_KEPT = {"fprop": ((0,), (1,)), "dgrad": ((0,), (0,)), "wgrad": ((1,), (1,))}
_TENSORS = {"fprop": "xw", "dgrad": "gw", "wgrad": "xg"}


@functools.partial(jax.jit, static_argnums=(0, 1))
def expected_operands(
    recipe: fp8.Recipe, matmul: str, tensors: dict[str, jax.Array], state: Any
) -> list[fp8.QuantizedTensor]:
    """The operands of a matmul of a layer, quantized by themselves on the CPU."""
    expected = []
    for name, kept, quantizer in zip(
        _TENSORS[matmul], _KEPT[matmul], quantizers(recipe, matmul), strict=True
    ):
        x = tensors[name]
        if isinstance(quantizer, Current):
            rule = {
                field: getattr(quantizer.rule, field)
                for field in ("power_of_two", "scale_format", "scale_rounding")
            }
            granularity = quantizer.granularity.for_matmul(kept, x.ndim)
            expected.append(fp8.quantize(x, quantizer.format, granularity, **rule))
        else:
            scale = (
                quantizer.scale if isinstance(quantizer, Static) else state.scale["xwg".index(name)]
            )
            expected.append(fp8.quantize(x, quantizer.format, scale=scale))
    return expected


def differs(
    operand: np.ndarray, scale: np.ndarray | None, expected: fp8.QuantizedTensor
) -> str | None:
    """How an operand differs from a quantized tensor; None if they agree.

    An operand of another shape, a tile in a loop over tiles, is not compared.
    """
    values, dequantized = (
        np.asarray(v).astype(np.float64)
        for v in (expected.values, expected.dequantize(jnp.float32))
    )
    operand = operand.reshape([size for size in operand.shape if size > 1])
    if operand.shape == values.shape[::-1]:
        operand = operand.T
    if operand.shape != values.shape:
        return None
    if scale is not None and scale.ndim == 0:
        # 1: it goes onto the product
        wanted = [1.0, *np.ravel(expected.scale)[: expected.scale.size == 1]]
        if scale not in wanted:
            return f"scale {scale}, none of {wanted}"
    if operand.dtype == expected.values.dtype:
        same = operand.view(np.uint8) == np.asarray(expected.values).view(np.uint8)
        return None if same.all() else f"{(~same).sum()} payloads"
    # The values themselves, if scales are multiplied onto the product; or bfloat16(value) *
    # bfloat16(scale).
    wide = operand.astype(np.float64)
    close = 0.0 if expected.power_of_two or expected.scale.size > 1 else 2.0**-7
    if (wide == values).all() or (np.abs(wide - dequantized) <= close * np.abs(dequantized)).all():
        return None
    return f"{(np.abs(wide - dequantized) > close * np.abs(dequantized)).sum()} dequantized values"


# The functions. Each takes a setup, then arrays; the state is that of `state_for`.


def state_for(setup: Setup, *stacked: int) -> Any:
    """A state that has seen the arrays of another seed; of stateless recipes there is none."""
    state = fp8.init_state(setup.recipe)
    if setup.recipe.rows:
        _, _, state = jax.jit(functools.partial(layer, setup))(state, *arrays(seed=1))
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*stacked, *leaf.shape)), state)


def layer(setup: Setup, state: Any, x: jax.Array, w: jax.Array, c: jax.Array) -> Any:
    """(loss, y), (dx, dw) and the next state of one dense layer."""

    def loss(params: Any, state: Any, c: jax.Array) -> Any:
        y = fp8.dot(*params, **setup._asdict(), state=state)
        return jnp.sum((y * c).astype(jnp.float32)), y

    return fp8.value_and_grad(loss, has_aux=True)((x, w), state, c)


def prologue(setup: Setup, state: Any, x: jax.Array, w: jax.Array, c: jax.Array) -> Any:
    """The same of silu(x) * x, which is made in the quantizer."""

    def loss(params: Any, state: Any, c: jax.Array) -> Any:
        x, w = params
        y = fp8.dot((x, x), w, **setup._asdict(), state=state, prologue=fp8.prologues.SwiGLU())
        return jnp.sum((y * c).astype(jnp.float32)), y

    return fp8.value_and_grad(loss, has_aux=True)((x, w), state, c)


def vmapped(setup: Setup, state: Any, x: jax.Array, w: jax.Array, c: jax.Array) -> Any:
    """The same of two examples of x at once, one eight times the other."""

    def loss(params: Any, state: Any, c: jax.Array) -> Any:
        x, w = params
        one = lambda x: fp8.dot(x, w, **setup._asdict(), state=state)
        y = jax.vmap(one)(jnp.stack([x, 8 * x]))
        return jnp.sum((y * jnp.stack([c, c / 8])).astype(jnp.float32)), y

    return fp8.value_and_grad(loss, has_aux=True)((x, w), state, c)


LAYERS = 2


def training_step(setup: Setup, state: Any, x: jax.Array, w: jax.Array, c: jax.Array) -> Any:
    """The loss, the parameters after a step of AdamW and the next state.

    Layers in a scan, rematerialized.
    """
    params = {"up": jnp.stack([w, w[::-1]]), "down": jnp.stack([w.T, w.T[::-1]])}

    def block(h: jax.Array, given: Any) -> tuple[jax.Array, None]:
        params, state = given
        up = fp8.dot(h, params["up"], **setup._asdict(), state=state["up"])
        down = fp8.dot(jax.nn.relu(up), params["down"], **setup._asdict(), state=state["down"])
        return h + 0.1 * down, None

    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(jax.checkpoint(block), x, (params, state))
        return jnp.sum((y * c[:, :K]).astype(jnp.float32))

    value, grads, state = fp8.value_and_grad(loss)(params, {"up": state, "down": state}, x)
    optimizer = optax.adamw(1e-3)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax's own
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return (value, grads), (optax.apply_updates(params, updates),), state


def granularity_of_x(recipe: fp8.Recipe) -> tuple[Any, dict[str, Any]]:
    """How fprop quantizes x, for `fp8.quantize`.

    With a scale of its own where the recipe brings one.
    """
    quantizer = recipe.fprop.lhs
    if not isinstance(quantizer, Current):
        return (quantizer.format, fp8.PerTensor()), {}
    fields = {
        field: getattr(quantizer.rule, field)
        for field in ("power_of_two", "scale_format", "scale_rounding")
    }
    return (quantizer.format, quantizer.granularity.for_matmul((0,), 2)), fields


def fake_quantize(setup: Setup, x: jax.Array) -> Any:
    """The value and, as the gradient, a tensor of ones."""
    given, fields = granularity_of_x(setup.recipe)
    value, pull_back = jax.vjp(lambda x: fp8.fake_quantize(x, *given, **fields), x)
    return value, *pull_back(jnp.ones_like(value))


def quantize_dequantize(setup: Setup, x: jax.Array) -> Any:
    given, fields = granularity_of_x(setup.recipe)
    q = fp8.quantize(x, *given, **fields, kernels=setup.kernels)
    return q.values, q.scale, q.dequantize(), q.dequantize(jnp.float32)


STEPS: dict[str, Callable[..., Any]] = {
    "layer": layer, "training step": training_step, "prologue": prologue, "vmap": vmapped,
}  # fmt: skip
CASTS: dict[str, Callable[..., Any]] = {
    "fake_quantize": fake_quantize,
    "quantize().dequantize()": quantize_dequantize,
}
