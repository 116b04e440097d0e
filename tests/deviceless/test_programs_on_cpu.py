"""Programs compiled for GPUs, run on the CPU: their numbers are those of the CPU's own program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import BLACKWELL
from targets import compile_for, dense_step

import jaxfp8 as fp8
from jaxfp8.programs.on_cpu._run import run_on_cpu

pytestmark = pytest.mark.deviceless

AS_WRITTEN = {"xla_allow_excess_precision": False}


def values(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def on_gpu(function, *arguments, chip="h200", options=None, seen=None):
    return run_on_cpu(
        compile_for(chip, function, *arguments, options=options), *arguments, seen=seen
    )


def on_cpu(function, *arguments):
    return jax.jit(function).lower(*arguments).compile(AS_WRITTEN)(*arguments)


def numbers(x):
    x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def distance(got, wanted):
    """The largest of all leaves, each in units of its norm."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
    assert [(x.shape, x.dtype) for x, _ in pairs] == [(y.shape, y.dtype) for _, y in pairs]
    differences = [
        np.linalg.norm(numbers(x) - numbers(y)) / (np.linalg.norm(numbers(y)) + 1e-30)
        for x, y in pairs
    ]
    return max(differences)


X, W = values(64, 96), values(96, 48, seed=1)
BF16 = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
STACK = values(5, 96, 96, seed=2) / 10
# What it is, the function, its arguments, how far it may be from the CPU.
FUNCTIONS = {
    "matmul": (lambda x, w: x @ w, (X, W), 1e-6),
    "matmul, bf16": (lambda x, w: x @ w, BF16, 2**-8),
    "matmul, int8": (
        lambda x: jax.lax.dot(x, x.T, preferred_element_type=jnp.int32),
        ((X * 30).astype(jnp.int8),),
        0,
    ),
    "einsum": (lambda x: jnp.einsum("bij,bkj->kbi", x, x), (values(4, 16, 96),), 1e-6),
    "gradient": (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)), (W, X), 1e-5),
    "scan": (
        lambda x, w: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w),
        (X, STACK),
        1e-5,
    ),
    "while": (
        lambda n, x: jax.lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (jnp.int32(0), x)
        ),
        (jnp.int32(7), X),
        1e-6,
    ),
    "cond": (
        lambda p, x, w: jax.lax.cond(p > 0, lambda: x @ w, lambda: w[:64]),
        (jnp.int32(1), X, W),
        1e-6,
    ),
    "softmax": (jax.nn.softmax, (X,), 1e-6),
    "softmax, bf16": (jax.nn.softmax, BF16[:1], 2**-7),
    "layer norm": (lambda x: jax.nn.standardize(x) * 3, (X,), 1e-5),
    "sort": (lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), jax.lax.top_k(x, 3)), (X,), 0),
    "cumsum": (lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x.reshape(-1))), (X,), 1e-5),
    "reductions": (
        lambda x: (x.sum(0), x.max(1), jnp.argmax(x, 1), x.mean(), jnp.any(x > 3)),
        (X,),
        1e-6,
    ),
    "gather": (lambda x, i: (x[i], x.at[i].add(x[0])), (X, jnp.array([3, 5, 60], jnp.int32)), 1e-6),
    "convolution by windows": (
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 3), (2, 2), "VALID"),
        (X,),
        0,
    ),
    "random": (
        lambda key: (
            jax.random.split(key),
            jax.random.bits(key, (9,)),
            jax.random.normal(key, (9,)),
        ),
        (jax.random.key(3),),
        1e-6,
    ),
    "gelu": (
        lambda x: (jax.nn.gelu(x, approximate=False), jax.nn.gelu(x), jax.nn.silu(x)),
        (X,),
        1e-6,
    ),
    "trigonometry": (
        lambda x: (
            [f(jnp.tanh(x)) for f in (jnp.sinh, jnp.cosh, jnp.tan, jnp.arcsin, jnp.arccos)]
            + [jnp.arctanh(jnp.tanh(x) / 2), jnp.arcsinh(x), jnp.arccosh(1 + x**2)]
        ),
        (X,),
        1e-5,
    ),
    "fft": (lambda x: jnp.fft.rfft(x), (X,), 1e-6),
    "unused arguments": (lambda a, x, tree: (x * 2, tree["b"]), (X, X, {"a": X, "b": W}), 0),
    "transposed": (lambda x: (x.T.reshape(32, -1).T, x.T.astype(jnp.bfloat16)), (X,), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, arguments, tolerance = FUNCTIONS[name]
    assert distance(on_gpu(function, *arguments), on_cpu(function, *arguments)) <= tolerance


M, K, N = 128, 96, 160
LAYER = (
    values(M, K, dtype=jnp.bfloat16),
    values(K, N, dtype=jnp.bfloat16),
    values(M, N, dtype=jnp.bfloat16),
)


def test_a_layer_in_high_precision():
    """Those in FP8 are in test_fp8_on_gpus.py."""
    recipe = fp8.recipes.identity()
    step, arguments, seen = dense_step(recipe), (*LAYER, fp8.init_state(recipe)), []
    got = on_gpu(step, *arguments, seen=lambda label, *_: seen.append(label))
    assert distance(got[1:], on_cpu(step, *arguments)[1:]) < 0.01
    assert len(seen) == 3


@pytest.mark.parametrize("shapes", [((300, 272), (272, 200)), ((32, 32), (32, 32))])
def test_padded_scales_on_blackwell(shapes):
    recipe = fp8.recipes.mxfp8()
    step = dense_step(recipe, kernels=BLACKWELL)
    (m, _), (_, n) = shapes
    x, w, g = (values(*shape, dtype=jnp.bfloat16) for shape in (*shapes, (m, n)))
    arguments = x, w, g, fp8.init_state(recipe)
    got, wanted = (
        on_gpu(step, *arguments, chip="b200"),
        on_cpu(step, *arguments),
    )
    assert distance(got[1:], wanted[1:]) < 0.01


def scales_seen(options):
    """Of the matmul of a layer with scales that no bfloat16 is."""
    recipe, seen = fp8.recipes.static(x_scale=0.1, w_scale=0.3, g_scale=0.7), {}
    step = lambda x, w: fp8.dot(x, w, recipe=recipe, state=fp8.init_state(recipe))
    on_gpu(
        step,
        *LAYER[:2],
        options=options,
        seen=lambda label, lhs, rhs, *scales: seen.update({label: scales}),
    )
    (scales,) = seen.values()
    return [float(scale) for scale in scales]


def test_scales_of_tensors_reach_cublaslt_in_float32_only_with_excess_precision():
    library = {"xla_gpu_enable_triton_gemm": False}
    assert scales_seen(library) == [float(np.float32(0.1)), float(np.float32(0.3))]
    assert scales_seen(library | AS_WRITTEN) == [float(jnp.bfloat16(0.1)), float(jnp.bfloat16(0.3))]
