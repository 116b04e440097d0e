"""What `flax.serialization` saves, and what it refuses to restore."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits

import jaxfp8 as fp8

KERNEL = np.random.default_rng(2).standard_normal((32, 8)).astype(np.float32)
PARAMS = {"kernel": KERNEL, "bias": np.zeros(8, np.float32)}
BLOCKWISE = fp8.recipes.blockwise()


def quantized(recipe=BLOCKWISE, params=PARAMS, **options):
    return fp8.quantize_params(params, recipe, **{"primary": True} | options)


def check_round_trip(tree):
    like = jax.tree.map(jnp.zeros_like, tree)
    restored = flax.serialization.from_bytes(like, flax.serialization.to_bytes(tree))
    assert_same_bits(restored, tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)


def in_e5m2(x):
    return x.astype(jnp.float8_e5m2) if x.dtype == jnp.float8_e4m3fn else x


@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("recipe", [BLOCKWISE, fp8.recipes.mxfp8()], ids=["blockwise", "mxfp8"])
def test_a_weight(recipe, primary):
    check_round_trip(quantized(recipe, primary=primary))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (lambda: PARAMS, "the saved tree has none there"),
        (
            lambda: quantized(params=PARAMS | {"kernel": np.ones((32, 4), np.float32)}),
            r"float8_e4m3fn\[32, 8\].*float8_e4m3fn\[32, 4\]",
        ),
        (
            lambda: jax.tree.map(in_e5m2, quantized()),
            r"float8_e4m3fn\[32, 8\].*float8_e5m2\[32, 8\]",
        ),
    ],
    ids=["in high precision", "shape", "format"],
)
def test_another_weight(source, says):
    data = flax.serialization.to_bytes(source())
    with pytest.raises(ValueError, match=f"kernel.*{says}"):
        flax.serialization.from_bytes(quantized(), data)


def test_a_tensor():
    check_round_trip(fp8.quantize(KERNEL, fp8.E4M3))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (lambda: KERNEL, r"an FP8 tensor \[32, 8\], but the saved tree has none there"),
        (lambda: fp8.quantize(KERNEL.T, fp8.E4M3), r"values float8_e4m3fn\[32, 8\].*\[8, 32\]"),
        (lambda: fp8.quantize(KERNEL, fp8.E5M2), "values float8_e4m3fn.*float8_e5m2"),
        (
            lambda: fp8.quantize(KERNEL, fp8.E4M3, fp8.PerAxis(0)),
            r"scale float32\[\].*float32\[32, 1\]",
        ),
    ],
    ids=["in high precision", "shape", "format", "scales"],
)
def test_another_tensor(source, says):
    target = {"x": fp8.quantize(KERNEL, fp8.E4M3)}
    data = flax.serialization.to_bytes({"x": source()})
    with pytest.raises(ValueError, match=f"x: the target.*{says}"):
        flax.serialization.from_bytes(target, data)


@pytest.mark.parametrize(("change", "match"), [
    (lambda d: {**d, "scale": d["scale"][:2]}, r"scale has shape \[2\]: its shape must be \[3\]"),
    (lambda d: {**d, "amax_history": np.zeros((3, 9))}, r"amax_history has shape \[3, 9\]"),
    (lambda d: {"scale": d["scale"]}, r"amax_history: it is missing"),
    (lambda d: {**d, "kernel": d["scale"]}, r"\['kernel'\] at the state"),
])  # fmt: skip
def test_a_state_of_another_shape(change, match):
    state = fp8.init_state(fp8.recipes.delayed(history_length=4))
    with pytest.raises(fp8.FP8StateError, match=match):
        flax.serialization.from_state_dict(state, change(flax.serialization.to_state_dict(state)))
