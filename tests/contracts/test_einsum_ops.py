"""`FP8EinsumOp` of linen and nnx.

Called, and as the `_dot_general=` of jnp.einsum, under the transformations of users.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "blockwise": fp8.recipes.blockwise(),
}
KEY = jax.random.key(0)
X, W = jax.random.normal(KEY, (6, 8)), jax.random.normal(jax.random.key(1), (8, 8)) / 4
EQUATION = "bd,dk->bk"
WAYS = {
    "called": lambda op, x, w: op(EQUATION, x, w),
    "plugged": lambda op, x, w: jnp.einsum(EQUATION, x, w, _dot_general=op.dot_general),
}


LEFT_OUT = {("current", "called"), ("current", "plugged"), ("blockwise", "plugged")}


class Product(nn.Module):
    recipe: fp8.Recipe
    way: str

    @nn.compact
    def __call__(self, x, _=None):
        w = self.param("w", lambda key: W)
        return jnp.tanh(WAYS[self.way](fp8.linen.FP8EinsumOp(self.recipe), x, w)), None


class NnxProduct(nnx.Module):
    def __init__(self, recipe, way):
        self.w, self.op, self.way = nnx.Param(W), fp8.nnx.FP8EinsumOp(recipe), way

    def __call__(self, x):
        return jnp.tanh(WAYS[self.way](self.op, x, self.w[...]))


# A recipe with state in both ways, and one without.
ROWS = [
    pytest.param(recipe, way, marks=pytest.mark.slow if (recipe, way) in LEFT_OUT else ())
    for recipe in RECIPES
    for way in WAYS
]


def einsum_twice(recipe):
    """Two steps with fp8.einsum: loss, gradient and state of the second."""

    def loss_fn(w, state, x):
        return jnp.sum(jnp.tanh(fp8.einsum(EQUATION, x, w, recipe=recipe, state=state)))

    step = jax.jit(fp8.value_and_grad(loss_fn))
    _, _, state = step(W, fp8.init_state(recipe), X)
    return step(W, state, 3 * X)


def assert_same(got, want):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("recipe", "way"), ROWS)
def test_linen(recipe, way):
    """The second step reads the scales of the first: no state is kept from before."""
    model = Product(RECIPES[recipe], way)
    variables = jax.jit(model.init)(KEY, X)
    abstract = jax.eval_shape(model.init, KEY, X)
    assert jax.tree.structure(abstract) == jax.tree.structure(variables)

    def loss_fn(params, state, x):
        return jnp.sum(model.apply({"params": params, COLLECTION: state}, x)[0])

    step = jax.jit(fp8.value_and_grad(loss_fn))
    _, _, state = step(variables["params"], variables.get(COLLECTION, {}), X)
    assert_same(step(variables["params"], state, 3 * X), einsum_twice(RECIPES[recipe]))


@pytest.mark.parametrize(("recipe", "way"), ROWS)
def test_nnx(recipe, way):
    model = NnxProduct(RECIPES[recipe], way)
    step = nnx.jit(fp8.nnx.value_and_grad(lambda model, x: jnp.sum(model(x))))
    step(model, X)
    loss, grads = step(model, 3 * X)
    state = () if model.op.state is None else model.op.state.get_value()
    assert_same((loss, grads["w"].get_value(), state), einsum_twice(RECIPES[recipe]))


@pytest.mark.parametrize("way", ["called", pytest.param("plugged", marks=pytest.mark.slow)])
def test_a_scanned_stack_under_remat(way):
    """Each layer has its own state, which sees what its layer sees."""
    lifted = {
        "variable_axes": {"params": 0, COLLECTION: 0},
        "split_rngs": {"params": True},
        "length": 3,
    }
    model = nn.scan(nn.remat(Product), **lifted)(RECIPES["delayed"], way)
    variables = jax.jit(model.init)(KEY, X, None)
    loss_fn = lambda params, state: jnp.sum(
        model.apply({"params": params, COLLECTION: state}, X, None)[0]
    )
    _, _, state = jax.jit(fp8.value_and_grad(loss_fn))(variables["params"], variables[COLLECTION])
    (state,) = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, fp8.state.MatmulState))
    amaxes = np.asarray(state.amax_history)[:, 0, -1]  # of x, of each layer
    assert amaxes[0] == np.max(np.abs(X))
    assert (amaxes[1:] <= 1).all()
    assert len(set(amaxes.tolist())) == 3


def test_a_module_with_a_state_as_a_field():
    """flax serializes attributes that are trees, also while it traces: that is no restored file."""

    class Held(nn.Module):
        def setup(self):
            self.held = fp8.init_state(RECIPES["delayed"])

        def __call__(self, x):
            return fp8.dot(x, W, recipe=RECIPES["delayed"], state=self.held)

    y = jax.jit(lambda x: Held().apply({}, x))(X)
    assert np.isfinite(y).all()
