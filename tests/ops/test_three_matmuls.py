"""The three matmuls of each recipe against NumPy.

Which scale each operand is cast by, and what is multiplied with what.
"""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8 as fp8
from jaxfp8.state._state import SeenAmax

M, K, N = 6, 5, 4
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
# The amaxes that a warm state has seen of x, w, g: each scale differs, and x saturates.
SEEN = np.float32([1.5, 3.25, 0.7])


def cast(v, amax, form, power_of_two=False):
    """v as FP8 sees it, by the scale that `amax` asks for."""
    multiplier = np.float32(LARGEST[form]) / np.float32(amax)
    if power_of_two:
        multiplier = np.ldexp(np.float32(0.5), np.frexp(multiplier)[1])
    values = np.clip(np.float32(v) * multiplier, -LARGEST[form], LARGEST[form]).astype(DTYPE[form])
    return values.astype(np.float64) / multiplier.astype(np.float64)


def whole(form, **rule):
    return lambda v, axis, seen: cast(v, np.max(np.abs(v)), form, **rule)


def remembered(form):
    return lambda v, axis, seen: cast(v, seen, form)


def rows(form, **rule):
    return lambda v, axis, seen: cast(v, np.max(np.abs(v), axis=axis, keepdims=True), form, **rule)


def constant(form, scale):
    return lambda v, axis, seen: cast(v, np.float32(scale) * np.float32(LARGEST[form]), form)


def alone(v, axis, seen):
    return np.float64(v)


WHOLE = [[whole("e4m3")] * 2, [whole("e5m2"), whole("e4m3")], [whole("e4m3"), whole("e5m2")]]
REMEMBERED = [
    [remembered("e4m3")] * 2,
    [remembered("e5m2"), remembered("e4m3")],
    [remembered("e4m3"), remembered("e5m2")],
]
# recipe, state is warm, and the cast of (x, w) in fprop, (g, w) in dgrad, (x, g) in wgrad
TABLE = {
    "delayed_unset": (fp8.recipes.delayed(), False, *WHOLE),
    "delayed": (fp8.recipes.delayed(), True, *REMEMBERED),
    "current": (fp8.recipes.current(), False, *WHOLE),
    "rowwise": (fp8.recipes.rowwise(power_of_two=False), False, *[[rows("e4m3")] * 2] * 3),
    "rowwise_power_of_two": (
        fp8.recipes.rowwise(power_of_two=True), False, *[[rows("e4m3", power_of_two=True)] * 2] * 3,
    ),
    "rowwise_hp_wgrad": (
        fp8.recipes.rowwise(power_of_two=False, high_precision_wgrad=True), False,
        [rows("e4m3")] * 2, [rows("e4m3"), whole("e4m3")], [alone, alone],
    ),
    "rowwise_hp_wgrad_power_of_two": (
        fp8.recipes.rowwise(power_of_two=True, high_precision_wgrad=True), False,
        [rows("e4m3", power_of_two=True)] * 2,
        [rows("e4m3", power_of_two=True), whole("e4m3", power_of_two=True)],
        [alone, alone],
    ),
    "static": (
        fp8.recipes.static(x_scale=0.004, w_scale=0.01, g_scale=2.0**-13), False,
        [constant("e4m3", 0.004), constant("e4m3", 0.01)],
        [constant("e5m2", 2.0**-13), constant("e4m3", 0.01)],
        [constant("e4m3", 0.004), constant("e5m2", 2.0**-13)],
    ),
    "identity": (fp8.recipes.identity(), False, *[[alone, alone]] * 3),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name", TABLE)
def test_against_numpy(name):
    recipe, warm, fprop, dgrad, wgrad = TABLE[name]
    generator = np.random.default_rng(0)
    x, w, g = (generator.normal(size=size).astype(np.float32) for size in ((M, K), (K, N), (M, N)))
    state = fp8.init_state(recipe)
    if warm:
        state = fp8.commit(state, SeenAmax(jnp.asarray(SEEN), state.rows))

    def loss(operands, state):
        y = fp8.dot(*operands, recipe=recipe, state=state)
        return jnp.sum(y * g), y

    (_, y), (dx, dw), _ = jax.jit(fp8.value_and_grad(loss, has_aux=True))(
        (jnp.asarray(x), jnp.asarray(w)), state
    )

    def multiply(lhs, rhs, casts, seen):
        """[a, k] @ [k, b] of cast operands."""
        return casts[0](lhs, 1, SEEN[seen[0]]) @ casts[1](rhs, 0, SEEN[seen[1]])

    wanted = {
        "y": (y, multiply(x, w, fprop, (0, 1))),
        "dx": (dx, multiply(g, w.T, dgrad, (2, 1))),
        "dw": (dw, multiply(x.T, g, wgrad, (0, 2))),
    }
    for tensor, (got, want) in wanted.items():
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 2e-6, f"{tensor}: {error}"


def test_only_fprop_may_accumulate_in_fewer_bits():
    """Hopper's tensor cores keep about 14 bits of a sum where XLA is told DEFAULT."""
    x, w = jnp.ones((M, K), jnp.bfloat16), jnp.ones((K, N), jnp.bfloat16)

    def loss(x, w):
        return jnp.sum(fp8.dot(x, w, recipe=fp8.recipes.current()), dtype=jnp.float32)

    def precisions(f):
        """Of the matmuls of f, one for each platform."""
        text = str(jax.make_jaxpr(f)(x, w))
        return re.findall(r"precision=\(Precision.(\w+)", text)

    fprop, three = precisions(loss), precisions(jax.grad(loss, (0, 1)))
    assert set(fprop) == {"DEFAULT"}
    assert three == fprop + ["HIGHEST"] * 2 * len(fprop)
