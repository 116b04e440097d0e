"""What users pass by mistake: an error with the name, the value and the cure, never a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

CURRENT, DELAYED = fp8.recipes.current(), fp8.recipes.delayed()
X, W = jnp.ones((4, 8)), jnp.ones((8, 2))


def cast(state, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), state)


@pytest.mark.parametrize(
    ("error", "call", "parts"),
    [
        (
            TypeError,
            lambda: fp8.dot(X, W, recipe=CURRENT, preferred_element_type=jnp.int32),
            ("preferred_element_type=int32", "use one of"),
        ),
        (
            TypeError,
            lambda: fp8.dot(X, W, recipe=CURRENT, preferred_element_type=jnp.float8_e4m3fn),
            ("preferred_element_type=float8_e4m3fn", "use one of"),
        ),
        (
            fp8.FP8StateError,
            lambda: fp8.dot(
                X, W, recipe=DELAYED, state=cast(fp8.init_state(DELAYED), jnp.bfloat16)
            ),
            ("bfloat16", "Cast parameters only"),
        ),
        (
            fp8.FP8StateError,
            lambda: fp8.dot(X, W, recipe=fp8.recipes.identity(), state="mine"),
            ("has no state", "state=None"),
        ),
        (
            TypeError,
            lambda: fp8.dot(X, W, recipe=fp8.recipes.identity(), kernels="h200"),
            ("kernels='h200' is of type str", "Write kernels=fp8.Kernels('h200')"),
        ),
        (
            ValueError,
            lambda: fp8.dot_general(X, W, ((1,), (0,)), recipe=CURRENT),
            ("dimension_numbers=((1,), (0,))", "as in jax.lax.dot_general"),
        ),
        (
            ValueError,
            lambda: fp8.dot_general(X, W, (((1.5,), (0,)), ((), ())), recipe=CURRENT),
            ("1.5", "as in jax.lax.dot_general"),
        ),
        (
            TypeError,
            lambda: fp8.einsum(5, X, W, recipe=CURRENT),
            ("equation=5", "must be a string"),
        ),
        (
            ValueError,
            lambda: fp8.einsum("mk,kn->nm", X, W, recipe=CURRENT, out_sharding=P(None, None, None)),
            ("out_sharding", "3 axes", "drop the surplus"),
        ),
        (
            ValueError,
            lambda: fp8.dot([[1.0]], [1.0], recipe=CURRENT),
            ("[1, 1]", "[1]", "use fp8.dot_general"),
        ),
        (
            ValueError,
            lambda: fp8.recipes.static(x_scale=1, w_scale=0, g_scale=1),
            ("w_scale=0", "positive"),
        ),
    ],
    ids=range(11),
)
def test_misuse(error, call, parts):
    with pytest.raises(error, match=mentions(*parts)):
        call()


def test_aux_holds_no_probe():
    def loss(w, state):
        return jnp.sum(fp8.dot(X, w, recipe=DELAYED, state=state)), {"state": state}

    state = fp8.init_state(DELAYED)
    (_, aux), _, _ = jax.jit(fp8.value_and_grad(loss, has_aux=True))(W, state)
    assert jax.tree.structure(aux["state"]) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["current", "rowwise", "identity"])
def test_row_parallel_layout_on_an_explicit_mesh(name):
    """Both operands of wgrad are split over the axis that the weight is split over."""
    recipe = fp8.recipes.get(name)
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (8, 8)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (8, 6)), jnp.float32)

    def gradient(x, w, out_sharding=None):
        return jax.grad(
            lambda w: jnp.sum(fp8.dot(x, w, recipe=recipe, out_sharding=out_sharding) ** 2)
        )(w)

    want = jax.jit(gradient)(x, w)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x, w: gradient(x, w, P("d", "m")))(
            jax.device_put(x, jax.NamedSharding(mesh, P("d", "m"))),
            jax.device_put(w, jax.NamedSharding(mesh, P("m", None))),
        )
    np.testing.assert_allclose(got, want, rtol=1e-6)
