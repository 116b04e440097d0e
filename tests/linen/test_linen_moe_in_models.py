"""`linen.FP8MoE` in scans and remat, with other tools, and with bad input."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_made import made
from linen_moe_cases import IDENTITY, E, F, K, mesh_of_four, run, tokens

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8MoE
from jaxfp8.moe import ExpertParallel


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_of_a_scan_have_states_of_their_own(remat):
    recipe = fp8.recipes.delayed()

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            layer = nn.remat(FP8MoE, prevent_cse=False) if remat else FP8MoE
            y, stats = layer(E, F, 2, recipe=recipe, name="moe")(x)
            return x + y, stats.load_balancing_loss

    stack = nn.scan(
        Block, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True}, length=2
    )()
    variables = made(stack, tokens(), None, recipe=recipe)

    def loss(params, state, x):
        y, losses = stack.apply({"params": params, COLLECTION: state}, x, None)
        return jnp.sum(y**2) + jnp.sum(losses)

    step = jax.jit(fp8.value_and_grad(loss))
    _, grads, state = step(variables["params"], variables[COLLECTION], tokens())
    assert state["moe"]["w_in"]["fp8"].scale.shape == (2, E, 3)
    assert (np.asarray(state["moe"]["w_in"]["fp8"].scale) > 0).any(axis=1).all()
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(np.asarray(leaf)).all()
        assert np.asarray(leaf).any()


@pytest.mark.slow
def test_a_step_of_remat_has_the_bits_of_one_without():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.blockwise())
    kept = nn.remat(FP8MoE, policy=fp8.save_fp8_residuals())(E, F, 2, recipe=layer.recipe)
    variables = made(layer, tokens())
    got, want = run(kept, variables, tokens()), run(layer, variables, tokens())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got[:3], want[:3])


def test_the_backward_pass_keeps_no_tokens_in_float32():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.blockwise(), dtype=jnp.bfloat16)
    x = tokens(5, 7).astype(jnp.bfloat16)
    variables = made(layer, x)
    back = jax.eval_shape(lambda x: jax.vjp(lambda x: layer.apply(variables, x)[0], x)[1], x)
    kept = [leaf for leaf in jax.tree.leaves(back) if leaf.shape in ((35, K), (5, 7, K))]
    assert all(leaf.dtype != jnp.float32 for leaf in kept), kept


def test_specs_of_states_are_those_of_kernels():
    variables = made(FP8MoE(E, F, 2), tokens())
    split = {"kernel": jax.P("expert", None, None)}
    specs = fp8.linen.state_specs(
        variables[COLLECTION], {"router": jax.P(), "w_in": split, "w_out": split}
    )
    assert specs["w_in"]["fp8"].scale[0] == "expert"


def test_stochastic_rounding_draws_keys():
    recipe = fp8.recipes.blockwise(gradient_rounding="stochastic")
    layer = FP8MoE(E, F, 2, recipe=recipe)
    params, x = made(layer, tokens())["params"], tokens()

    @jax.jit
    def grads(params, x, key):
        def loss(params):
            return jnp.sum(layer.apply({"params": params}, x, rngs={"fp8": key})[0] ** 2)

        return jax.grad(loss)(params)["w_out"]["kernel"]

    first, again, other = (np.asarray(grads(params, x, jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"experts": 0}, ValueError, "experts=0 must be an integer of at least 1"),
        ({"hidden": 2.0}, ValueError, "hidden=2.0 must be an integer"),
        ({"k": 9}, ValueError, "k=9 is more than experts=8"),
        ({"shared": -1}, ValueError, "shared=-1 must be an integer of at least 0"),
        ({"scores": "relu"}, ValueError, "scores='relu'"),
        ({"clamp": 3.0}, ValueError, "clamp=3.0 must be two numbers"),
        ({"parallel": "expert"}, TypeError, "parallel='expert' must be an fp8.moe.ExpertParallel"),
        ({"recipe": "delayed"}, TypeError, "recipe"),
        ({"save_original": "x"}, ValueError, "save_original="),
        ({"state_channel": "gradients"}, ValueError, "state_channel="),
    ],
)
def test_bad_fields_are_named_when_the_layer_is_made(fields, error, says):
    with pytest.raises(error, match=says):
        FP8MoE(**{"experts": E, "hidden": F, "k": 2, **fields})


def test_bad_inputs_are_named():
    layer = FP8MoE(E, F, 2)
    with pytest.raises(TypeError, match="inputs is None"):
        layer.init(jax.random.key(0), None)
    with pytest.raises(TypeError, match="inputs has dtype int32"):
        layer.init(jax.random.key(0), jnp.ones((3, K), int))
    with pytest.raises(ValueError, match=r"inputs has shape \[\]"):
        layer.init(jax.random.key(0), jnp.float32(1.0))


def test_kernels_of_experts_stay_in_high_precision():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.blockwise(), shared=16)
    params = made(layer, tokens())["params"]
    quantize = functools.partial(fp8.quantize_params, recipe=layer.recipe)
    with pytest.raises(TypeError, match=r"w_in is QuantizedWeight.*FP8MoE takes matrices in high"):
        jax.eval_shape(lambda p: layer.apply({"params": quantize(p)}, tokens()), params)
    rules = [("shared.*/kernel", fp8.weights.WeightAxes(contracted=(0,)))]
    held = jax.jit(functools.partial(quantize, rules=rules))(params)
    assert isinstance(held["shared_in"]["kernel"], fp8.weights.QuantizedWeight)
    both = jax.jit(lambda x, *trees: [layer.apply({"params": tree}, x)[0] for tree in trees])
    np.testing.assert_array_equal(*both(tokens(), held, params))
    delayed = FP8MoE(E, F, 2)
    variables = made(delayed, tokens())
    with pytest.raises(fp8.FP8StateError, match=r"w_in/kernel has stacked states.*experts take it"):
        fp8.quantize_params(variables["params"], delayed.recipe, state=variables[COLLECTION])


def test_experts_that_devices_cannot_divide_are_named():
    layer = FP8MoE(6, F, 2, parallel=ExpertParallel(axis="expert"))
    mesh = mesh_of_four()
    init = jax.shard_map(
        layer.init, mesh=mesh, in_specs=(jax.P(), jax.P("expert")), out_specs=jax.P()
    )
    with pytest.raises(ValueError, match="experts=6 cannot be split over the 4 devices"):
        jax.eval_shape(init, jax.random.key(0), tokens())


def test_convert_leaves_it_as_it_is():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y, stats = FP8MoE(E, F, 2, shared=8, name="moe", recipe=IDENTITY)(x)
            return nn.Dense(4, name="out")(y), stats

    _, coverage = fp8.convert(Model(), fp8.recipes.current(), inputs=(tokens(),))
    for path in ("moe", "moe/w_in", "moe/w_out", "moe/shared_in", "moe/shared_out"):
        assert coverage[path].reason == "an FP8 layer already"


def test_records_name_both_matmuls():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.current())
    variables = made(layer, tokens())
    with fp8.diagnostics.collect() as records:
        jax.jit(layer.apply)(variables, tokens())
    assert {row.layer for row in records.rows()} == {"w_in", "w_out"}


def test_kernels_in_boxes_of_partitions():
    init = nn.with_partitioning(nn.initializers.lecun_normal(batch_axis=(0,)), ("e", None, None))
    layer = FP8MoE(E, F, 2, kernel_init=init)
    variables = made(layer, tokens())
    assert isinstance(variables["params"]["w_in"]["kernel"], nn.Partitioned)
    boxed, plain = (
        str(jax.make_jaxpr(layer.apply)(each, tokens()))
        for each in (variables, nn.meta.unbox(variables))
    )
    assert boxed == plain
