"""`linen.FP8GroupedLinear`: experts with a kernel, a bias and a state each."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linen_made import made

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8GroupedLinear

K, N = 32, 24
SIZES = np.array([7, 0, 12], np.int32)
SLOW = pytest.mark.slow


def rows(count=24, seed=0):
    return np.random.default_rng(seed).standard_normal((count, K)).astype(np.float32)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(fp8.recipes.blockwise(), marks=SLOW), fp8.recipes.delayed()],
    ids=["blockwise", "delayed"],
)
def test_is_ragged_dot_of_its_parameters(recipe):
    layer = FP8GroupedLinear(N, recipe=recipe, dtype=jnp.bfloat16)
    variables = made(layer, rows(), SIZES)
    kernel, bias = (variables["params"][name] for name in ("kernel", "bias"))
    assert kernel.shape == (3, K, N)
    assert kernel.dtype == jnp.float32
    state = variables[COLLECTION]["fp8"] if recipe.rows else None

    @jax.jit
    def function(kernel, bias, state):
        low = [jnp.asarray(each, jnp.bfloat16) for each in (rows(), kernel, bias)]
        return fp8.ragged_dot(*low[:2], SIZES, recipe=recipe, state=state, bias=low[2])

    y = jax.jit(layer.apply)(variables, rows(), SIZES)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y), np.asarray(function(kernel, bias, state)))


def test_each_kernel_starts_like_that_of_a_dense_layer():
    layer = FP8GroupedLinear(256, recipe=fp8.recipes.current())
    init = jax.jit(layer.init)
    variables = init(jax.random.key(0), np.ones((4, 512), np.float32), np.int32([1, 1, 2]))
    spread = np.std(np.asarray(variables["params"]["kernel"]), axis=(1, 2))
    np.testing.assert_allclose(spread, 1 / np.sqrt(512), rtol=0.03)


def test_one_state_for_all_groups():
    layer = FP8GroupedLinear(N, recipe=fp8.recipes.delayed(), state_per_group=False)
    state = jax.eval_shape(layer.init, jax.random.key(0), rows(), SIZES)[COLLECTION]
    assert state["fp8"].scale.shape == (3,)


@pytest.mark.parametrize("each", [True, pytest.param(False, marks=SLOW)])
def test_a_step_moves_the_states_of_groups_with_rows(each):
    layer = FP8GroupedLinear(N, recipe=fp8.recipes.delayed(), state_per_group=each)
    variables = made(layer, rows(), SIZES)
    params, state = variables["params"], variables[COLLECTION]

    def loss(params, state, x, sizes):
        y = layer.apply({"params": params, COLLECTION: state}, x, sizes)
        return jnp.mean((y - 1.0) ** 2)

    step = jax.jit(fp8.value_and_grad(loss))
    losses = []
    for _ in range(5):
        value, grads, state = step(params, state, rows(), SIZES)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    scale = np.asarray(state["fp8"].scale)
    if each:
        assert scale.shape == (3, 3)
        assert (scale[[0, 2]] > 0).all()
        assert not scale[1].any()
        assert not np.asarray(grads["kernel"])[1].any()
        assert not np.asarray(grads["bias"])[1].any()
    else:
        assert scale.shape == (3,)
        assert (scale > 0).all()


def test_layers_of_a_scan_have_states_of_their_own():
    recipe = fp8.recipes.delayed()

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, sizes):
            return FP8GroupedLinear(K, recipe=recipe)(x, sizes), None

    stack = nn.scan(
        Block, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True}, length=2,
        in_axes=nn.broadcast,
    )()  # fmt: skip
    variables = made(stack, rows(), SIZES, recipe=recipe)

    def loss(params, state):
        return jnp.sum(stack.apply({"params": params, COLLECTION: state}, rows(), SIZES)[0] ** 2)

    _, grads, state = jax.jit(fp8.value_and_grad(loss))(variables["params"], variables[COLLECTION])
    (found,) = [
        leaf.scale
        for leaf in jax.tree.leaves(state, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    ]
    assert found.shape == (2, 3, 3)
    assert (np.asarray(found)[:, [0, 2]] > 0).all()
    assert all(np.isfinite(np.asarray(each)).all() for each in jax.tree.leaves(grads))


def test_experts_of_a_shard_map():
    layer = FP8GroupedLinear(N, recipe=fp8.recipes.delayed())
    sizes = np.array([7, 0, 12, 5], np.int32)
    variables = made(layer, rows(24), sizes)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    x = np.concatenate([rows(24), rows(24, seed=1)])
    split = P("expert")
    got = jax.jit(
        jax.shard_map(layer.apply, mesh=mesh, in_specs=(split, split, split), out_specs=split)
    )(variables, x, sizes)
    apply = jax.jit(layer.apply)
    for i in (0, 1):
        part = jax.tree.map(lambda leaf: leaf[2 * i : 2 * i + 2], variables)  # noqa: B023
        want = apply(part, x[24 * i : 24 * i + 24], sizes[2 * i : 2 * i + 2])
        np.testing.assert_array_equal(np.asarray(got[24 * i : 24 * i + 24]), np.asarray(want))


def test_stochastic_rounding_draws_keys():
    recipe = fp8.recipes.blockwise(gradient_rounding="stochastic")
    layer = FP8GroupedLinear(N, recipe=recipe)
    variables = made(layer, rows(), SIZES)

    @jax.jit
    def grads(key):
        def loss(params):
            return jnp.sum(layer.apply({"params": params}, rows(), SIZES, rngs={"fp8": key}) ** 2)

        return jax.grad(loss)(variables["params"])["kernel"]

    first, again, other = (np.asarray(grads(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("sizes", [np.int32(3), np.ones((3, 1), np.int32), np.ones(4, np.int32)])
def test_sizes_of_another_shape_are_refused(sizes):
    layer = FP8GroupedLinear(N)
    variables = made(layer, rows(), SIZES)
    with pytest.raises(ValueError, match=r"Pass the number of rows of each group, \[3\]"):
        layer.apply(variables, rows(), sizes)


@pytest.mark.parametrize("option", [{"save_original": "x"}, {"state_channel": "gradients"}])
def test_options_are_checked_when_the_layer_is_made(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}="):
        FP8GroupedLinear(N, **option)


def test_convert_leaves_it_as_it_is():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, sizes):
            x = FP8GroupedLinear(K, name="experts", recipe=fp8.recipes.blockwise())(x, sizes)
            return nn.Dense(N, name="out")(x)

    _, coverage = fp8.convert(Model(), fp8.recipes.current(), inputs=(rows(), SIZES))
    assert coverage["experts"].reason == "an FP8 layer already"


def test_a_kernel_in_a_box_of_partitions():
    init = nn.with_partitioning(nn.initializers.lecun_normal(batch_axis=(0,)), ("e", None, None))
    layer = FP8GroupedLinear(N, kernel_init=init)
    variables = made(layer, rows(), SIZES)
    assert isinstance(variables["params"]["kernel"], nn.Partitioned)
    apply = jax.jit(functools.partial(layer.apply, inputs=rows(), group_sizes=SIZES))
    np.testing.assert_array_equal(apply(variables), apply(nn.meta.unbox(variables)))


def test_sizes_beyond_32_bits_are_not_cut():
    layer = FP8GroupedLinear(N)
    variables = made(layer, rows(), SIZES)
    with pytest.raises(ValueError, match="add up to at most the 24 rows"):
        layer.apply(variables, rows(), np.array([2**40, 1, 1]))
    with pytest.raises(TypeError, match="group_sizes is"):
        layer.apply(variables, rows(), [2**40, 1, 1])
