"""What `fp8.moe.swiglu_experts` takes. tests/ops and tests/meshes have its results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8

T, K, F, E = 6, 16, 8, 4


def given(dtype=np.float32):
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=shape).astype(dtype)
    chosen = np.array([[0, 2], [2, 1], [3, 0], [1, 2], [0, 1], [2, 3]], np.int32)
    return {
        "x": normal(T, K), "gates": np.full((T, 2), 0.5, np.float32), "chosen": chosen,
        "w_in": normal(E, K, 2 * F), "w_out": normal(E, F, K),
    }  # fmt: skip


def result(**changed):
    arrays = {**given(), **changed}
    return fp8.moe.swiglu_experts(**{"recipe": fp8.recipes.blockwise(), **arrays}).y


def test_arrays_of_numpy():
    @jax.jit  # as constants of one program, because arguments would be jax's arrays
    def run():
        want = result(**jax.tree.map(jnp.asarray, given()))
        # Without 64 bits, jax reads float64 as float32.
        return want, result(**given(np.float32)), result(**given(np.float64))

    want, *found = run()
    for got in found:
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"x": np.ones((T, K), int)}, TypeError, "x has dtype int32"),
        ({"gates": np.ones((T, 2), complex)}, TypeError, "gates has dtype complex64"),
        ({"chosen": np.ones((T, 2), np.float32)}, TypeError, "chosen has dtype float32"),
        ({"chosen": np.ones((T, 1), int)}, ValueError, r"shapes do not fit: .*chosen \[6, 1\]"),
        ({"w_out": None}, TypeError, "w_out is None"),
        ({"key": 0}, TypeError, "key=0 is not one PRNG key"),
        ({"parallel": "expert"}, TypeError, "parallel='expert' must be an fp8.moe.ExpertParallel"),
        ({"clamp": (0, 1)}, ValueError, r"clamp=\(0, 1\)"),
    ],
)
def test_bad_inputs_are_named(changed, error, says):
    with pytest.raises(error, match=says):
        result(**changed)


def test_fp8_weights_are_refused():
    w_in = fp8.quantize_params({"kernel": given()["w_in"]}, fp8.recipes.blockwise())["kernel"]
    with pytest.raises(TypeError, match=r"w_in is QuantizedWeight.*swiglu_experts takes matrices"):
        result(w_in=w_in)


def test_both_matmuls_round_by_the_key():
    recipe, arrays = fp8.recipes.blockwise(gradient_rounding="stochastic"), given()

    @jax.jit
    @jax.grad
    def gradients(weights, key):
        return jnp.sum(result(recipe=recipe, key=key, **weights) ** 2)

    weights = {name: arrays[name] for name in ("w_in", "w_out")}
    keys = [np.array([0, seed], np.uint32) for seed in (0, 0, 1)]
    first, again, other = (gradients(weights, key) for key in keys)
    for name in weights:
        np.testing.assert_array_equal(first[name], again[name])
        assert np.any(first[name] != other[name]), name
