"""What cannot be summed is refused, before anything is sent."""

import functools

import gradient_sums as sums
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.comms import AutoScaledFP8, BFloat16Sum, TwoPhaseFP8

D = 4
MESH = functools.partial(sums.mesh_of, d=D)
G = np.ones((D, 8, 64), np.float32)
REDUCE, SCATTER = fp8.comms.all_reduce_gradients, fp8.comms.reduce_scatter_gradients


@pytest.mark.parametrize("function", [REDUCE, SCATTER])
def test_where_it_is_called(function):
    with pytest.raises(
        ValueError, match=mentions("axis_name='d'", "manual axes are []", "inside jax.shard_map")
    ):
        function(jnp.ones(4), "d")
    for names, parts in {
        "e": ("axis_name='e'", "['e'] are no manual mesh axes", "['d']"),
        ("d", "e"): ("axis_name=('d', 'e')", "['e'] are no manual"),
        ("d", "d"): ("axis_name=('d', 'd')", "each mesh axis once"),
        (): ("axis_name=()", "at least one"),
    }.items():
        with pytest.raises(ValueError, match=mentions(*parts)):
            sums.on_devices(lambda g, names=names: function(g, names), MESH(), "d")(G)


@pytest.mark.parametrize("function", [REDUCE, SCATTER])
def test_a_gradient_that_jax_has_summed(function):
    """JAX sums gradients of parameters that do not vary. A second sum would be too large."""

    def gradient(vary, x, w):
        w = jax.lax.pcast(w, "d", to="varying") if vary else w
        grads = jax.grad(lambda w: jnp.mean((x @ w["a"]) ** 2))(w)
        total = function(grads, "d")
        return total[0] if function is REDUCE else total

    out = P() if function is REDUCE else P("d")
    call = lambda vary: sums.on_devices(functools.partial(gradient, vary), MESH(), "d", out=out)
    with pytest.raises(
        ValueError,
        match=mentions(
            "the gradient ['a'] does not vary over ['d']", "already summed",
            'jax.lax.pcast(params, (\'d\',), to="varying")',
        ),
    ):  # fmt: skip
        call(False)(G, {"a": np.ones((64, 4), np.float32)})
    found = call(True)(G, {"a": np.ones((64, 4), np.float32)})
    np.testing.assert_allclose(found["a"], np.full((64, 4), 2 * 64 / 4))


def test_a_gradient_that_is_summed_over_one_of_two_axes():
    def local(g):
        return REDUCE(jax.lax.psum(g, "b"), ("a", "b"))[0]

    with pytest.raises(ValueError, match=mentions("gradient grads", "['b']", "pcast")):
        sums.on_devices(local, sums.mesh_of(a=4, b=2), ("a", "b"))(np.ones((8, 4), np.float32))


LEAVES = {
    "QuantizedTensor": (lambda g: fp8.quantize(g, fp8.E4M3), ("QuantizedTensor", "dequantize()")),
    "integers": (lambda g: g.astype(jnp.int32), ("int32", "floating point")),
    "complex": (lambda g: g.astype(jnp.complex64), ("complex64", "real floating point")),
    "FP8": (lambda g: g.astype(jnp.float8_e4m3fn), ("float8_e4m3fn", "no scale", "bfloat16")),
    "a number": (lambda g: 1.0, ("float", "floating point")),
}


@pytest.mark.parametrize("kind", LEAVES)
@pytest.mark.parametrize("function", [REDUCE, SCATTER])
def test_leaves_that_are_no_gradients(kind, function):
    make, parts = LEAVES[kind]

    def local(g):
        return function({"fine": g, "bad": make(g)}, "d")

    with pytest.raises(TypeError, match=mentions("the gradient ['bad']", *parts)):
        sums.on_devices(local, MESH(), "d")(G)


def test_methods_are_instances():
    for method in (TwoPhaseFP8, "fp8", None):
        for function in (REDUCE, SCATTER):
            with pytest.raises(TypeError, match=mentions("method=", "TwoPhaseFP8()", "fp8.comms")):
                function(jnp.ones(4), "d", method=method)
        with pytest.raises(TypeError, match=mentions("method=", "BFloat16Sum()")):
            fp8.comms.init_gradient_sums(jnp.ones(4), method)


def test_what_cannot_be_scattered():
    def scatter(g, **how):
        return SCATTER({"w": g}, "d", **how)

    def call(x=G, **how):
        return sums.on_devices(functools.partial(scatter, **how), MESH(), "d", out=P("d"))(x)

    with pytest.raises(
        ValueError, match=mentions("AutoScaledFP8", "no reduce-scatter", "TwoPhaseFP8()")
    ):
        call(method=AutoScaledFP8())
    for axis in (2, -3, True, 0.0):
        with pytest.raises(
            ValueError, match=mentions(f"axis={axis!r} is no axis", "['w'] [8, 64]", "all_reduce")
        ):
            call(axis=axis)
    with pytest.raises(
        ValueError, match=mentions("axis=0", "['w'] [6, 64]", "evenly among 4 devices")
    ):
        call(G[:, :6])
    assert call(axis={"w": 0}, method=BFloat16Sum())["w"].shape == (8, 64)
