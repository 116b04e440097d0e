"""`linen.FP8MoE`: what it computes, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_moe_cases import IDENTITY, RECIPES, E, F, K, made, reference, run, tokens, wide

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8MoE


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
