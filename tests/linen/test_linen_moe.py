"""`linen.FP8MoE`: a layer of experts with its router, on one device and on meshes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8MoE
from jaxfp8.moe import ExpertParallel

E, F, K = 8, 24, 32
IDENTITY = fp8.recipes.identity()
RECIPES = [
    fp8.recipes.delayed(), fp8.recipes.current(), fp8.recipes.rowwise(), fp8.recipes.blockwise(),
    fp8.recipes.mxfp8(), IDENTITY,
]  # fmt: skip


def tokens(*shape, seed=1):
    return jax.random.normal(jax.random.key(seed), (*(shape or (4, 6)), K))


def made(layer, x=None, seed=0):
    # Operation by operation it takes seconds.
    return jax.jit(layer.init)(jax.random.key(seed), tokens() if x is None else x)


def mesh_of_four(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(kind,))


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), tree)


def swiglu(x, w_in, w_out, clamp):
    gate, linear = np.split(x @ w_in, 2, axis=-1)
    if clamp is not None:
        gate, linear = np.minimum(gate, clamp[0]), np.clip(linear, -clamp[1], clamp[1])
    return (gate / (1 + np.exp(-gate)) * linear) @ w_out


def reference(params, x, k, scores="softmax", normalized=True, clamp=None):
    """A loop over tokens and experts, in float64."""
    params, x = wide(params), wide(x)
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        logits = token @ params["router"]
        score = 1 / (1 + np.exp(-logits))
        if scores == "softmax":
            score = np.exp(logits - logits.max())
            score /= score.sum()
        chosen = np.argsort(-score)[:k]
        gates = score[chosen] / (score[chosen].sum() if normalized else 1)
        y = sum(
            gate * swiglu(token, *(params[w]["kernel"][e] for w in ("w_in", "w_out")), clamp)
            for gate, e in zip(gates, chosen, strict=True)
        )
        if "shared_in" in params:
            shared = (params[w]["kernel"] for w in ("shared_in", "shared_out"))
            y = y + swiglu(token, *shared, clamp)
        rows.append(y)
    return np.stack(rows).reshape(x.shape)


def loss_of(layer):
    def loss(params, state, x):
        y, stats = layer.apply({"params": params, COLLECTION: state}, x)
        weight = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        value = jnp.sum(y.astype(jnp.float32) * weight)
        return value + 0.1 * stats.load_balancing_loss + 0.01 * stats.z_loss, (y, stats)

    return loss


def run(layer, variables, x):
    step = jax.jit(fp8.value_and_grad(loss_of(layer), has_aux=True))
    (_, (y, stats)), grads, state = step(variables["params"], variables.get(COLLECTION, {}), x)
    return y, stats, grads, state


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"k": 1}, {"k": E}, {"scores": "sigmoid"}, {"normalized": False}, {"shared": 16},
        {"clamp": (0.3, 0.2), "shared": 8}, {"experts": 3, "hidden": 5},
    ],
    ids=str,
)  # fmt: skip
def test_is_a_loop_over_tokens_and_experts(fields):
    fields = {"experts": E, "hidden": F, "k": 2, **fields}
    layer = FP8MoE(**fields, recipe=IDENTITY)
    x = tokens(3, 5)
    variables = made(layer, x)
    y, stats = jax.jit(layer.apply)(variables, x)
    how = {name: fields[name] for name in ("scores", "normalized", "clamp") if name in fields}
    want = reference(variables["params"], x, fields["k"], **how)
    np.testing.assert_allclose(np.asarray(y), want, rtol=1e-4, atol=1e-5)
    assert int(stats.load.sum()) == 15 * fields["k"]
    assert int(stats.dropped) == 0


def test_stats_are_those_of_the_router():
    layer = FP8MoE(E, F, 2, recipe=IDENTITY)
    variables = made(layer)
    _, stats = jax.jit(layer.apply)(variables, tokens())
    logits = tokens().reshape(-1, K) @ variables["params"]["router"]
    chosen = fp8.moe.top_k(logits, 2).chosen
    np.testing.assert_array_equal(np.asarray(stats.load), np.asarray(fp8.moe.load(chosen, E)))
    want = fp8.moe.load_balancing_loss(logits, chosen)
    np.testing.assert_allclose(stats.load_balancing_loss, want, rtol=1e-6)
    np.testing.assert_allclose(stats.z_loss, fp8.moe.z_loss(logits), rtol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (), (2, 1, 3, 2)], ids=str)
def test_leading_axes_and_the_order_of_tokens_come_back(shape):
    layer = FP8MoE(E, F, 2, recipe=IDENTITY)
    variables = made(layer)
    x = jax.random.normal(jax.random.key(3), (*shape, K))
    y, _ = jax.jit(layer.apply)(variables, x)
    assert y.shape == x.shape
    apply = jax.jit(layer.apply)
    each = [apply(variables, row[None])[0][0] for row in x.reshape(-1, K)]
    np.testing.assert_allclose(np.asarray(y).reshape(-1, K), np.stack(each), atol=1e-5)


def test_the_router_learns_through_gates_and_losses():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.blockwise())
    variables = made(layer)

    def of_result(params):
        return jnp.sum(layer.apply({"params": params}, tokens())[0])

    def of_losses(params):
        stats = layer.apply({"params": params}, tokens())[1]
        return stats.load_balancing_loss + stats.z_loss

    for loss in (of_result, of_losses):
        grads = jax.jit(jax.grad(loss))(variables["params"])
        assert (np.asarray(grads["router"]) != 0).any(axis=0).all()
    assert not np.asarray(grads["w_in"]["kernel"]).any()  # losses do not train experts


def test_the_router_asks_for_float32_where_the_default_is_tf32():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.blockwise(), dtype=jnp.bfloat16)
    x = tokens().astype(jnp.bfloat16)

    def loss(params, x):
        return layer.apply({"params": params}, x)[1].z_loss

    text = jax.jit(jax.grad(loss, (0, 1))).lower(made(layer, x)["params"], x).as_text()
    matmuls = [line for line in text.splitlines() if "dot_general" in line]
    of_logits, *gradients = (line for line in matmuls if f"tensor<24x{E}xf32>" in line)
    assert len(gradients) == 2
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in (of_logits, *gradients))


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])
def test_every_recipe_is_near_high_precision(recipe, dtype):
    layer = FP8MoE(E, F, 2, recipe=recipe, dtype=dtype, shared=16)
    variables = made(layer)
    y, _, grads, _ = run(layer, variables, tokens().astype(dtype))
    assert y.dtype == dtype
    exact = FP8MoE(E, F, 2, recipe=IDENTITY, shared=16)
    x = tokens().astype(dtype).astype(jnp.float32)
    want, _, near, _ = run(exact, {"params": variables["params"]}, x)
    far = jax.tree.map(
        lambda a, b: np.linalg.norm(wide(a) - wide(b)) / np.linalg.norm(wide(b)),
        (y, grads), (want, near),
    )  # fmt: skip
    # The router's gradient is a difference of results of experts, which are alike.
    router = far[1].pop("router")
    assert router < 0.3
    assert max(jax.tree.leaves(far)) < 0.15, far
    assert (router > 0) == (recipe is not IDENTITY or dtype == jnp.bfloat16)


@pytest.mark.parametrize("each", [True, False])
def test_two_steps_move_states_and_lower_the_loss(each):
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.delayed(), state_per_expert=each, shared=16)
    # Tokens of one direction choose the same two experts, so that the others stay without tokens.
    x = jnp.ones((12, K)) + 0.01 * tokens(12)
    variables = made(layer, x)
    params, state = variables["params"], variables[COLLECTION]

    @jax.jit
    def step(params, state):
        def loss(params, state):
            y, stats = layer.apply({"params": params, COLLECTION: state}, x)
            return jnp.mean((y - 1.0) ** 2), stats

        (value, stats), grads, state = fp8.value_and_grad(loss, has_aux=True)(params, state)
        return value, stats, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state

    losses = []
    for _ in range(3):
        value, stats, params, state = step(params, state)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    used = np.asarray(stats.load) > 0
    assert used.any()
    for name in ("w_in", "w_out"):
        scale = np.asarray(state[name]["fp8"].scale)
        assert scale.shape == ((E, 3) if each else (3,))
        assert (scale[used] > 0).all() if each else (scale > 0).all()
        assert not each or not scale[np.asarray(stats.load) == 0].any() or used.all()


def test_all_tokens_to_one_expert():
    layer = FP8MoE(E, F, 1, recipe=fp8.recipes.blockwise())
    x = jnp.abs(tokens())
    variables = made(layer, x)
    params = variables["params"] | {"router": jnp.zeros((K, E)).at[:, 5].set(1.0)}
    y, stats, grads, _ = run(layer, {"params": params}, x)
    np.testing.assert_array_equal(np.asarray(stats.load), np.eye(E, dtype=np.int32)[5] * 24)
    far = wide(y) - reference(params, x, 1)
    assert np.linalg.norm(far) < 0.1 * np.linalg.norm(wide(y))
    others = np.arange(E) != 5
    assert not np.asarray(grads["w_in"]["kernel"])[others].any()
    assert np.isfinite(np.asarray(grads["router"])).all()


def assert_same(got, want):
    # Programs of several devices fuse and add in another order, in the last bits of float32. Such a
    # bit may move a value to the next one of FP8, so single elements say less than norms.
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        far = np.linalg.norm(wide(a) - wide(b))
        assert far <= 5e-3 * np.linalg.norm(wide(b)), (jax.tree_util.keystr(path), far)


@pytest.mark.parametrize("recipe", [fp8.recipes.delayed(), IDENTITY], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_gives_the_results_of_one_device(kind, recipe):
    fields = {"experts": E, "hidden": F, "k": 2, "recipe": recipe, "shared": 16}
    variables, x = made(FP8MoE(**fields)), tokens()
    want = run(FP8MoE(**fields), variables, x)
    layer = FP8MoE(**fields, parallel=ExpertParallel(axis="expert"))
    mesh = mesh_of_four(kind)
    with jax.set_mesh(mesh):
        split = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(
                leaf, jax.P("expert" if path[1].key in ("w_in", "w_out") else None)
            ),
            variables,
        )
        got = run(layer, split, jax.device_put(x, jax.P("expert")))
        if kind == AxisType.Explicit:
            assert jax.typeof(got[0]).sharding.spec == jax.P("expert", None, None)
    assert_same(got, want)


@pytest.mark.parametrize("recipe", [fp8.recipes.delayed(), IDENTITY], ids=str)
def test_a_manual_mesh_gives_the_results_of_one_device(recipe):
    fields = {"experts": E, "hidden": F, "k": 2, "recipe": recipe, "shared": 16}
    x = tokens(8, 3)
    variables = made(FP8MoE(**fields))
    want = run(FP8MoE(**fields), variables, x)
    layer = FP8MoE(**fields, parallel=ExpertParallel(axis="expert"))
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.P("expert" if path[1].key in ("w_in", "w_out") else None), variables
    )
    rows = jax.P(("data", "expert"))

    def loss(params, state, x):
        y, stats = layer.apply({"params": params, COLLECTION: state}, x)
        device = jax.lax.axis_index("data") * 4 + jax.lax.axis_index("expert")
        place = jnp.arange(y.size, dtype=jnp.float32) + (device * y.size).astype(jnp.float32)
        value = jax.lax.psum(jnp.sum(y * jnp.cos(place).reshape(y.shape)), ("data", "expert"))
        return value + 0.1 * stats.load_balancing_loss + 0.01 * stats.z_loss, (y, stats)

    def step(params, state, x):
        (_, (y, stats)), grads, state = fp8.value_and_grad(loss, has_aux=True)(params, state, x)
        return y, stats, grads, state

    params, state = specs["params"], specs.get(COLLECTION, {})
    got = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(params, state, rows),
            out_specs=(rows, jax.P(), params, state),
        )
    )(variables["params"], variables.get(COLLECTION, {}), x)  # fmt: skip
    assert_same(got, want)


def test_init_inside_shard_map_makes_parts_of_one_layer():
    layer = FP8MoE(E, F, 2, parallel=ExpertParallel(axis="expert"), recipe=fp8.recipes.delayed())
    x, split = tokens(4, 6), jax.P("expert")
    mesh = mesh_of_four()
    specs = {"router": jax.P(), "w_in": split, "w_out": split}
    specs = {"params": specs, COLLECTION: {"w_in": split, "w_out": split}}
    got = jax.jit(jax.shard_map(layer.init, mesh=mesh, in_specs=(jax.P(), split), out_specs=specs))(
        jax.random.key(0), x
    )
    want = made(layer, x)  # `init` outside needs no mesh
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want)


def test_losses_without_varying_types_are_those_of_the_named_axes():
    layer = FP8MoE(E, F, 2, parallel=ExpertParallel(axis="expert"), recipe=IDENTITY)
    variables, x = made(layer), tokens()
    _, want = jax.jit(FP8MoE(E, F, 2, recipe=IDENTITY).apply)(variables, x)
    split = jax.P("expert")
    specs = {"params": {"router": jax.P(), "w_in": split, "w_out": split}}
    mesh = mesh_of_four()
    _, got = jax.jit(
        jax.shard_map(
            layer.apply, mesh=mesh, in_specs=(specs, split), out_specs=(split, jax.P()),
            check_vma=False,
        )
    )(variables, x)  # fmt: skip
    np.testing.assert_array_equal(np.asarray(got.load), np.asarray(want.load))
    np.testing.assert_allclose(got.load_balancing_loss, want.load_balancing_loss, rtol=1e-5)
    np.testing.assert_allclose(got.z_loss, want.z_loss, rtol=1e-5)


def test_dropped_choices_are_counted():
    parallel = ExpertParallel(axis="expert", capacity_factor=1.0)
    layer = FP8MoE(E, F, 1, parallel=parallel, recipe=IDENTITY)
    x = jnp.abs(tokens())
    params = made(layer, x)["params"] | {"router": jnp.zeros((K, E)).at[:, 5].set(1.0)}
    mesh = mesh_of_four()
    with jax.set_mesh(mesh):
        y, stats = jax.jit(layer.apply)({"params": params}, x)
    assert int(stats.dropped) == 24 - 4 * 2  # 6 tokens of each device, 2 slots for each device
    assert (np.asarray(y).reshape(24, K) == 0).all(axis=1).sum() == 16


@pytest.mark.parametrize("remat", [True, False])
def test_layers_of_a_scan_have_states_of_their_own(remat):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            layer = nn.remat(FP8MoE, prevent_cse=False) if remat else FP8MoE
            y, stats = layer(E, F, 2, recipe=fp8.recipes.delayed(), shared=8, name="moe")(x)
            return x + y, stats.load_balancing_loss

    stack = nn.scan(
        Block, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True}, length=2
    )()
    variables = jax.jit(stack.init)(jax.random.key(0), tokens(), None)

    def loss(params, state):
        y, losses = stack.apply({"params": params, COLLECTION: state}, tokens(), None)
        return jnp.sum(y**2) + jnp.sum(losses)

    _, grads, state = jax.jit(fp8.value_and_grad(loss))(variables["params"], variables[COLLECTION])
    assert state["moe"]["w_in"]["fp8"].scale.shape == (2, E, 3)
    assert (np.asarray(state["moe"]["w_in"]["fp8"].scale) > 0).any(axis=1).all()
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(np.asarray(leaf)).all()
        assert np.asarray(leaf).any()


def test_a_step_of_remat_has_the_bits_of_one_without():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.blockwise())
    kept = nn.remat(FP8MoE, policy=fp8.save_fp8_residuals())(E, F, 2, recipe=layer.recipe)
    variables = made(layer)
    got, want = run(kept, variables, tokens()), run(layer, variables, tokens())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got[:3], want[:3])


def test_the_backward_pass_keeps_no_tokens_in_float32():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.blockwise(), dtype=jnp.bfloat16)
    x = tokens(5, 7).astype(jnp.bfloat16)
    variables = made(layer, x)
    _, back = jax.vjp(lambda x: layer.apply(variables, x)[0], x)
    kept = [leaf for leaf in jax.tree.leaves(back) if leaf.shape in ((35, K), (5, 7, K))]
    assert all(leaf.dtype != jnp.float32 for leaf in kept), kept


def test_specs_of_states_are_those_of_kernels():
    variables = made(FP8MoE(E, F, 2))
    split = {"kernel": jax.P("expert", None, None)}
    specs = fp8.linen.state_specs(
        variables[COLLECTION], {"router": jax.P(), "w_in": split, "w_out": split}
    )
    assert specs["w_in"]["fp8"].scale[0] == "expert"


def test_stochastic_rounding_draws_keys():
    recipe = fp8.recipes.blockwise(gradient_rounding="stochastic")
    layer = FP8MoE(E, F, 2, recipe=recipe)
    variables = made(layer)

    @jax.jit
    def grads(key):
        def loss(params):
            return jnp.sum(layer.apply({"params": params}, tokens(), rngs={"fp8": key})[0] ** 2)

        return jax.grad(loss)(variables["params"])["w_out"]["kernel"]

    first, again, other = (np.asarray(grads(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"experts": 0}, ValueError, "experts=0 must be an integer, 1 or more"),
        ({"hidden": 2.0}, ValueError, "hidden=2.0 must be an integer"),
        ({"k": 9}, ValueError, "k=9 is more than experts=8"),
        ({"shared": -1}, ValueError, "shared=-1 must be an integer, 0 or more"),
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
    params = made(layer)["params"]
    with pytest.raises(TypeError, match=r"kernel of FP8MoE is QuantizedWeight.*leave out w_in/ker"):
        layer.apply({"params": fp8.quantize_params(params, layer.recipe)}, tokens())
    rules = [("shared.*/kernel", fp8.weights.WeightAxes(contracted=(0,)))]
    held = fp8.quantize_params(params, layer.recipe, rules=rules)
    assert type(held["shared_in"]["kernel"]).__name__ == "QuantizedWeight"
    got, want = (
        np.asarray(jax.jit(layer.apply)({"params": each}, tokens())[0]) for each in (held, params)
    )
    np.testing.assert_array_equal(got, want)
    delayed = FP8MoE(E, F, 2)
    variables = made(delayed)
    with pytest.raises(fp8.FP8StateError, match=r"w_in/kernel has stacked states.*experts take it"):
        fp8.quantize_params(variables["params"], delayed.recipe, state=variables[COLLECTION])


def test_experts_that_devices_cannot_divide_are_named():
    layer = FP8MoE(6, F, 2, parallel=ExpertParallel(axis="expert"))
    mesh = mesh_of_four()
    init = jax.shard_map(
        layer.init, mesh=mesh, in_specs=(jax.P(), jax.P("expert")), out_specs=jax.P()
    )
    with pytest.raises(ValueError, match="experts=6 cannot be split over the 4 devices"):
        init(jax.random.key(0), tokens())


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
    variables = made(layer)
    with fp8.diagnostics.collect() as records:
        jax.jit(jax.grad(lambda v: jnp.sum(layer.apply(v, tokens())[0])))(variables)
    assert {row.layer for row in records.rows()} == {"w_in", "w_out"}


def test_kernels_in_boxes_of_partitions():
    init = nn.with_partitioning(nn.initializers.lecun_normal(batch_axis=(0,)), ("e", None, None))
    layer = FP8MoE(E, F, 2, kernel_init=init)
    variables = made(layer)
    assert isinstance(variables["params"]["w_in"]["kernel"], nn.Partitioned)
    plain = nn.meta.unbox(variables)
    np.testing.assert_array_equal(
        jax.jit(layer.apply)(variables, tokens())[0], jax.jit(layer.apply)(plain, tokens())[0]
    )
