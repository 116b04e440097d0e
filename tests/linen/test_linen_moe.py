"""`linen.FP8MoE`: what it computes, on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_made import made
from linen_moe_cases import IDENTITY, RECIPES, E, F, K, reference, run, tokens, wide

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8MoE

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((2, 1, 3, 2), {}),
        ((7,), {"scores": "sigmoid", "normalized": False, "k": 3, "experts": 5, "hidden": 5}),
        ((), {"clamp": (0.3, 0.2), "shared": 8, "k": 1}),
        pytest.param((3, 5), {"k": E}, marks=SLOW),
        pytest.param((3, 5), {"scores": "sigmoid"}, marks=SLOW),
        pytest.param((3, 5), {"normalized": False}, marks=SLOW),
        pytest.param((3, 5), {"shared": 16}, marks=SLOW),
    ],
    ids=str,
)
def test_is_a_loop_over_tokens_and_experts(shape, fields):
    """Leading axes and the order of tokens come back."""
    fields = {"experts": E, "hidden": F, "k": 2, **fields}
    layer = FP8MoE(**fields, recipe=IDENTITY)
    x = tokens(5, 6)[:, :5].reshape(-1, K)[: int(np.prod(shape, dtype=int))].reshape(*shape, K)
    variables = made(layer, x)
    y, stats = jax.jit(layer.apply)(variables, x)
    assert y.shape == x.shape
    how = {name: fields[name] for name in ("scores", "normalized", "clamp") if name in fields}
    want = reference(variables["params"], x, fields["k"], **how)
    np.testing.assert_allclose(np.asarray(y), want, rtol=1e-4, atol=1e-5)
    assert int(stats.load.sum()) == np.prod(shape, dtype=int) * fields["k"]
    assert int(stats.dropped) == 0


def test_stats_are_those_of_the_router():
    layer = FP8MoE(E, F, 2, recipe=IDENTITY)
    variables = made(layer, tokens())

    @jax.jit
    def stats_of(variables, x):
        logits = x.reshape(-1, K) @ variables["params"]["router"]
        chosen = fp8.moe.top_k(logits, 2).chosen
        losses = fp8.moe.load_balancing_loss(logits, chosen), fp8.moe.z_loss(logits)
        return layer.apply(variables, x)[1], fp8.moe.load(chosen, E), losses

    stats, load, losses = stats_of(variables, tokens())
    np.testing.assert_array_equal(np.asarray(stats.load), np.asarray(load))
    np.testing.assert_allclose((stats.load_balancing_loss, stats.z_loss), losses, rtol=1e-6)


def test_the_router_learns_through_gates_and_losses():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.blockwise())

    @jax.jit
    def gradients(params, x, weights):
        def loss(params):
            y, stats = layer.apply({"params": params}, x)
            return weights[0] * jnp.sum(y) + weights[1] * (stats.load_balancing_loss + stats.z_loss)

        return jax.grad(loss)(params)

    params = made(layer, tokens())["params"]
    for weights in (np.float32([1, 0]), np.float32([0, 1])):
        grads = gradients(params, tokens(), weights)
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


@functools.cache
def in_high_precision(dtype):
    """The variables, and the result and gradients of tokens of that dtype."""
    exact = FP8MoE(E, F, 2, recipe=IDENTITY, shared=16)
    x = tokens().astype(dtype).astype(jnp.float32)
    variables = made(exact, x)
    want, _, near, _ = jax.device_get(run(exact, variables, x))
    return variables, want, near


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        pytest.param(
            recipe, dtype, id=f"{recipe.name}-{dtype.__name__}", marks=() if default else SLOW
        )
        for recipe in RECIPES
        for dtype in (jnp.float32, jnp.bfloat16)
        for default in [dtype == jnp.bfloat16 and recipe.name == "blockwise"]
    ],
)
def test_every_recipe_is_near_high_precision(recipe, dtype):
    layer = FP8MoE(E, F, 2, recipe=recipe, dtype=dtype, shared=16)
    variables, want, near = in_high_precision(dtype)
    assert variables.keys() == {"params"}
    if recipe.rows:
        variables = variables | {COLLECTION: made(layer, tokens())[COLLECTION]}
    y, _, grads, _ = run(layer, variables, tokens().astype(dtype))
    assert y.dtype == dtype
    far = jax.tree.map(
        lambda a, b: np.linalg.norm(wide(a) - wide(b)) / np.linalg.norm(wide(b)),
        (y, grads), (want, near),
    )  # fmt: skip
    # The router's gradient is a difference of results of experts, which are alike.
    router = far[1].pop("router")
    assert router < 0.3
    assert max(jax.tree.leaves(far)) < 0.15, far
    assert (router > 0) == (recipe is not IDENTITY or dtype == jnp.bfloat16)


@pytest.mark.parametrize("each", [True, pytest.param(False, marks=SLOW)])
def test_two_steps_move_states_and_lower_the_loss(each):
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.delayed(), state_per_expert=each)
    # Tokens of one direction choose the same two experts, so that the others stay without tokens.
    x = np.float32(1) + np.float32(0.01) * np.asarray(tokens(12))
    variables = made(layer, x)
    params, state = variables["params"], variables[COLLECTION]

    @jax.jit
    def step(params, state, x):
        def loss(params, state):
            y, stats = layer.apply({"params": params, COLLECTION: state}, x)
            return jnp.mean((y - 1.0) ** 2), stats

        (value, stats), grads, state = fp8.value_and_grad(loss, has_aux=True)(params, state)
        return value, stats, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state

    losses = []
    for _ in range(3):
        value, stats, params, state = step(params, state, x)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    used = np.asarray(stats.load) > 0
    assert used.any()
    for name in ("w_in", "w_out"):
        scale = np.asarray(state[name]["fp8"].scale)
        assert scale.shape == ((E, 3) if each else (3,))
        assert (scale[used] > 0).all() if each else (scale > 0).all()
        assert not each or not scale[np.asarray(stats.load) == 0].any() or used.all()


def test_one_state_for_all_experts():
    layer = FP8MoE(E, F, 2, recipe=fp8.recipes.delayed(), state_per_expert=False)
    state = jax.eval_shape(layer.init, jax.random.key(0), tokens())[COLLECTION]
    assert [state[name]["fp8"].scale.shape for name in ("w_in", "w_out")] == [(3,), (3,)]


def test_all_tokens_to_one_expert():
    layer = FP8MoE(E, F, 1, recipe=fp8.recipes.blockwise())
    x = np.abs(tokens())
    variables = made(layer, x)
    params = variables["params"] | {"router": np.float32([[each == 5 for each in range(E)]] * K)}
    y, stats, grads, _ = run(layer, {"params": params}, x)
    np.testing.assert_array_equal(np.asarray(stats.load), np.eye(E, dtype=np.int32)[5] * 24)
    far = wide(y) - reference(params, x, 1)
    assert np.linalg.norm(far) < 0.1 * np.linalg.norm(wide(y))
    others = np.arange(E) != 5
    assert not np.asarray(grads["w_in"]["kernel"])[others].any()
    assert np.isfinite(np.asarray(grads["router"])).all()
