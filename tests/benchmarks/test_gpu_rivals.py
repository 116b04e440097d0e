"""The rivals of the GPU benchmark compute what they are compared with, within the error of FP8."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from quick_flags import quick_flags

import jaxfp8 as fp8

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"

# The benchmark runs with JAX's own promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.cache
def rivals():
    """The file. Other files of `tests` have names of its neighbours, so its folder is not on the
    path.
    """
    spec = importlib.util.spec_from_file_location("gpu_rivals", FOLDER / "rivals.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def error(found, expected):
    """The relative error in Frobenius norm."""
    found, expected = (np.asarray(each, np.float64) for each in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def check_products(found, expected):
    """y, dx and dw are near, but not the same: x and w are in E4M3, the gradient of y is in E5M2.

    A normal value has a relative error of 0.026 in E4M3 and of 0.052 in E5M2. The errors of the two
    operands add up as squares.
    """
    for each, least, most in zip(found, (0.03, 0.045, 0.045), (0.045, 0.07, 0.07), strict=True):
        assert least < error(each, expected.pop(0)) < most


LIBRARIES = {
    "flax": lambda: rivals().flax(),
    "plain pattern": lambda: rivals().plain(),
    "delayed": lambda: rivals().ours(fp8.recipes.delayed(), "cpu", {}),
    "delayed, settled": lambda: rivals().ours(fp8.recipes.delayed(), "cpu", {}, settled=True),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_library(name):
    """y, dx and dw in the third step, whose scales are known. x has two leading axes, as tokens of
    sequences have. The gradient is as small as that of a mean loss.
    """
    library = LIBRARIES[name]()
    x, w, g = normal(0, 4, 32, 128), normal(1, 128, 64) / 8, normal(2, 4, 32, 64) / 2**14

    def loss(params, state):
        y = library.dot(*params, state)
        return jnp.sum((y * g).astype(jnp.float32)), y

    step = jax.jit(library.value_and_grad(loss, has_aux=True))
    state = library.state()
    for _ in range(3):
        (_, y), (dx, dw), state = step((x, w), state)
        assert jnp.isfinite(y).all()
    rows = x.reshape(-1, 128).astype(jnp.float32), g.reshape(-1, 64).astype(jnp.float32)
    check_products(
        [y.reshape(-1, 64), dx.reshape(-1, 128), dw],
        [rows[0] @ w.astype(jnp.float32), rows[1] @ w.T.astype(jnp.float32), rows[0].T @ rows[1]],
    )


@pytest.mark.parametrize("kind", ["batch", "ragged"])
def test_plain_products_of_experts(kind):
    sizes = jnp.array([5, 0, 27, 16], jnp.int32)
    x, w, g = normal(0, 48, 64), normal(1, 4, 64, 32) / 8, normal(2, 48, 32)
    product, rest = lax.ragged_dot, (sizes,)
    if kind == "batch":
        x, g, product, rest = x.reshape(4, 12, 64), g.reshape(4, 12, 32), jax.vmap(jnp.dot), ()

    def run(product, x, w, g):
        y, pull = jax.vjp(lambda x, w: product(x, w, *rest), x, w)
        return [y, *pull(g)]

    wide = (each.astype(jnp.float32) for each in (x, w, g))
    check_products(run(rivals().plain_product(product), x, w, g), run(product, *wide))


def test_plain_product_of_zeros():
    """No scale is 0, which would give NaN. Gradients of experts without tokens are 0."""
    y, pull = jax.vjp(
        rivals().plain_product(jnp.dot), normal(0, 16, 32), jnp.zeros((32, 8), "bfloat16")
    )
    assert not y.any()
    assert all(not each.any() for each in pull(jnp.zeros_like(y)))


@pytest.mark.parametrize(("shapes", "axes"), [(((32, 64), (48, 64)), 1), (((64, 32), (64, 48)), 0)])
def test_plain_matmul(shapes, axes):
    lhs, rhs = (
        fp8.quantize(normal(n, *shape), fp8.E4M3, fp8.PerTensor()) for n, shape in enumerate(shapes)
    )
    numbers = (((axes,), (axes,)), ((), ()))
    found = rivals().plain_matmul(numbers)(lhs, rhs)
    wide = (each.dequantize().astype(jnp.float32) for each in (lhs, rhs))
    # Scales, operands and the result are rounded to bfloat16.
    assert error(found, lax.dot_general(*wide, numbers)) < 2**-7


@pytest.mark.parametrize("name", ["tensor", "rows", "1x128", "1x128 and 128x1"])
def test_plain_casts(name):
    """Every value is within half a step of E4M3, and the tiles have a value at its largest."""
    x = normal(0, 256, 384) * jnp.exp2(jnp.arange(256.0)[:, None] % 9).astype(jnp.bfloat16)
    arrays = rivals().CASTS[name](x)
    for values, scale, kept in zip(arrays[::2], arrays[1::2], (x, x.T), strict=False):
        spread = jnp.repeat(scale.T, 128, axis=1) if "128" in name else scale[:, None]
        found = values.astype(jnp.float32) * spread
        exact = np.asarray(kept, np.float32)
        bound = np.maximum(np.abs(exact) * 2**-4, spread * 2**-10)
        assert np.all(np.abs(found - exact) <= bound)
        assert jnp.abs(values).astype(jnp.float32).max() == 448


def in_the_folder(code):
    """What `code` prints as JSON, with the benchmark's files on its path."""
    begin = f"import json, sys; sys.path.insert(0, {str(FOLDER)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_flags()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_plain_casts_write_the_arrays_of_the_library():
    """The bytes of the rows are then the same."""
    found = in_the_folder("""
import casts, jax, rivals
def types(function, way):
    return [*map(str, jax.eval_shape(function, *way.arguments((256, 384))))]
ways = {way.name: way for way in casts.CASTS}
print(json.dumps({name: [types(plain, ways[name]), types(ways[name].by("xla"), ways[name])]
                  for name, plain in rivals.CASTS.items()}))
""")
    assert set(found) == {*rivals().CASTS}
    for plain, ours in found.values():
        assert plain == ours


@pytest.mark.slow  # compiles a step for each contender
def test_train_steps_learn():
    """The loss of every contender falls as that of bfloat16, and rounding to FP8 changes it."""
    losses = in_the_folder("""
import jax, steps
(stack,) = steps.TINY_STACKS
losses = {}
for name, library in steps.contenders("cpu").items():
    if library.named: continue  # Pallas kernels need a GPU
    step = jax.jit(steps.step(library, stack, "xla"))
    *carried, x = steps.start(stack, library)
    losses[name] = []
    for _ in range(12):
        *carried, loss = step(*carried, x)
        losses[name].append(float(loss))
print(json.dumps(losses))
""")
    assert {"bf16", "delayed", "current", "rowwise", "flax", "plain pattern"} <= {*losses}
    wanted = losses["bf16"][0] - losses["bf16"][-1]
    assert wanted > 0.1
    for name, found in losses.items():
        assert found[0] - found[-1] == pytest.approx(wanted, rel=0.1), name
        assert (found == losses["bf16"]) == (name == "bf16")
