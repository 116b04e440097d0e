"""`fp8.quantize_params`: the results of weights in high precision to the bit, with fewer casts."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from primitives import count
from same_bits import assert_same_bits
from weight_cases import COPIES, RECIPES, WAYS, K, M, N, dot, held, init, normal, rows

import jaxfp8 as fp8
from jaxfp8.weights import QuantizedWeight, WeightAxes


def steps(recipe, way, w, x, bias, c):
    """y, gradients and state of two steps. The second finds its scales set."""

    def loss(params, state, x):
        y = dot(x, params["w"], recipe, state, bias=params["bias"])
        return jnp.sum((y * c).astype(jnp.float32)), y

    found, state = [], init(recipe)
    for i in range(2 if recipe.rows else 1):
        params = held(way, {"w": w * (1 + i), "bias": bias}, recipe, state)
        (_, y), grads, state = fp8.value_and_grad(loss, has_aux=True)(params, state, x)
        found.append((y, grads, state))
    return found


PAIRS = [
    ("delayed", "bfloat16"), ("mxfp8", "float16"), ("rowwise", "float32"), ("blockwise", "float32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in PAIRS else pytest.mark.slow)
        for name in RECIPES
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_same_bits(name, dtype):
    """Results, gradients and next state, from an unset state, and then from a set one."""
    recipe = RECIPES[name]
    arrays = [normal(i, *s, dtype=dtype) for i, s in enumerate([(K, N), (M, K), (N,), (M, N)])]
    # One program, whose parts share much.
    all_ways = jax.jit(lambda *given: [steps(recipe, way, *given) for way in ("plain", *WAYS)])
    want, *got = all_ways(*arrays)
    for each in got:
        assert_same_bits(each, want)
    assert want[-1][1]["w"].dtype == dtype
    assert np.any(np.asarray(want[-1][1]["w"]) != 0)


def plain_loss(params, recipe=RECIPES["mxfp8"], **options):
    return jnp.sum(dot(normal(1, M, K), held("cached", params, recipe, **options)["w"], recipe, ()))


def test_inside_a_loss():
    """`jax.grad` of a loss that quantizes its parameters gives their gradients."""
    params = {"w": normal(0, K, N)}
    direct = lambda params: jnp.sum(dot(normal(1, M, K), params["w"], RECIPES["mxfp8"], ()))
    assert_same_bits(jax.jit(jax.grad(plain_loss))(params), jax.jit(jax.grad(direct))(params))


def test_inside_a_loss_with_state():
    recipe, state = RECIPES["delayed"], init(RECIPES["delayed"])

    def loss(params, state, way):
        return jnp.sum(dot(normal(1, M, K), held(way, params, recipe, state)["w"], recipe, state))

    step = jax.jit(fp8.value_and_grad(loss), static_argnums=2)
    params = {"w": normal(0, K, N)}
    assert_same_bits(step(params, state, "cached"), step(params, state, "plain"))


def test_only_the_bias_is_trained():
    """And only x: with plain `jax.grad`, because the weight in FP8 is no argument."""
    recipe = RECIPES["blockwise"]
    w, x, bias = normal(0, K, N), normal(1, M, K), normal(2, N)
    weight = held("primary", {"w": w}, recipe)["w"]
    grads = jax.jit(
        lambda w: jax.grad(
            lambda x, bias: jnp.sum(dot(x, w, recipe, (), bias=bias)), argnums=(0, 1)
        )(x, bias)
    )
    assert_same_bits(grads(weight), grads(w))


def test_gradient_channel():
    """A loop that overwrites states with their gradients trains weights in FP8, too."""
    recipe = RECIPES["delayed"]

    def step(way):
        state, x = init(recipe), normal(1, M, K)
        params = held(way, {"w": normal(0, K, N)}, recipe, state)

        def loss(both, _):
            return jnp.sum(dot(x, both[0]["w"], recipe, both[1], state_channel="gradient"))

        return fp8.value_and_grad(loss)((params, state), ())[1]

    step = jax.jit(step, static_argnums=0)
    assert_same_bits(step("primary"), step("plain"))


@pytest.mark.parametrize("name", ["current", "blockwise"])
def test_a_layer_s_dtype(name):
    """Weights are rounded to the dtype of the layer before the cast."""
    recipe, w = RECIPES[name], normal(0, K, N)
    quantize = jax.jit(
        lambda w, dtype: held("primary", {"w": w}, recipe, dtype=dtype)["w"], static_argnums=1
    )
    rounded, direct = quantize(w, jnp.bfloat16), quantize(w.astype(jnp.bfloat16), None)
    assert rounded.dtype == direct.dtype == jnp.bfloat16
    assert_same_bits(rounded, direct)
    assert jnp.any(rounded.values[0] != quantize(w, None).values[0])


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("name", rows(("rowwise", "blockwise")))
def test_bytes(name, primary):
    """One byte a weight for each copy, and no array more in a primary weight."""
    weight = jax.eval_shape(
        lambda w: held("primary" if primary else "cached", {"w": w}, RECIPES[name],
                       init(RECIPES[name])),
        jax.ShapeDtypeStruct((1024, 512), jnp.float32),
    )["w"]  # fmt: skip
    size = 1024 * 512
    assert len(weight.values) == COPIES[name]
    assert size * COPIES[name] <= weight.nbytes <= 1.04 * size * COPIES[name]
    large = [leaf.dtype.name for leaf in jax.tree.leaves(weight) if leaf.size == size]
    assert large == ["float8_e4m3fn"] * COPIES[name] + ["float32"] * (not primary)
    assert (weight.shape, weight.ndim, weight.size, weight.dtype) == (
        (1024, 512),
        2,
        size,
        "float32",
    )


def test_rules():
    """The first match decides; None leaves a weight as it is; nothing else changes."""
    params = {
        "embed": {"kernel": jnp.ones((8, 4))},
        "blocks": [{"out": {"kernel": jnp.ones((2, 2, 4))}}, {"up": {"kernel": jnp.ones((4, 4))}}],
        "scale": jnp.ones(4),
    }
    rules = [
        ("embed/.*", None), (".*/out/kernel", WeightAxes(contracted=(0, 1))),
        (".*kernel", WeightAxes()),
    ]  # fmt: skip
    got = fp8.quantize_params(params, RECIPES["current"], rules=rules)
    assert got["embed"]["kernel"] is params["embed"]["kernel"]
    assert got["scale"] is params["scale"]
    out, up = got["blocks"][0]["out"]["kernel"], got["blocks"][1]["up"]["kernel"]
    assert isinstance(out, QuantizedWeight)
    assert (out.axes.contracted, up.axes.contracted) == ((0, 1), (0,))
    assert out.original is params["blocks"][0]["out"]["kernel"]
    one_rule = fp8.quantize_params({"a": params["scale"], **params["embed"]}, RECIPES["current"])
    assert isinstance(one_rule["kernel"], QuantizedWeight)


@pytest.mark.parametrize("casts", [None, pytest.param("mosaic", marks=needs_mosaic)])
def test_kernels_of_a_chip(casts):
    """A matmul of a weight in FP8 has one cast kernel less. The cast before it is XLA's."""
    recipe = RECIPES["delayed"]
    shapes = (4096, 1024), (1024, 512)

    def program(way):
        def step(x, w, state):
            params = held(way, {"w": w}, recipe, state)
            loss = lambda params, state: jnp.sum(
                dot(x, params["w"], recipe, state, kernels=fp8.Kernels("h200", casts=casts))
            )
            return fp8.value_and_grad(loss)(params, state)

        arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        # Each cast kernel is partitioned over the mesh by a rule of its own.
        return count(jax.make_jaxpr(step)(*arrays, init(recipe)).jaxpr, "custom_partitioning")

    kernels = program("plain") // 3
    assert program("plain") == 3 * kernels
    assert program("primary") == 2 * kernels
    assert (kernels > 0) == (casts is not None)


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_hard_values(name):
    """NaN, infinity and zero in the weight give what they give without `quantize_params`."""

    def run(way, w):
        params = held(way, {"w": w}, RECIPES[name])
        loss = lambda params, _: jnp.sum(dot(normal(1, M, K), params["w"], RECIPES[name], ()))
        return fp8.value_and_grad(loss)(params, ())

    steps = [jax.jit(functools.partial(run, way)) for way in ("primary", "plain")]
    for value in (np.nan, np.inf, 0.0):
        w = normal(0, K, N) if value else np.zeros((K, N), np.float32)
        w[3] = value
        chex.assert_trees_all_equal(*(step(w) for step in steps))
