"""Released layers: the numbers are those of `jax.vmap(tx.update)` on stacked gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen as nn
from flax import nnx
from release_cases import (
    TXS,
    L,
    body,
    inputs,
    loss_of,
    plain_step,
    released_step,
    stacked,
    updates_of,
)
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.optim import (
    BFloat16,
    BFloat16Plus,
    Int8,
    adamw,
    init_master_weights,
    release,
    with_master_weights,
    with_moment_formats,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
SGD = optax.sgd(2.0**-7, momentum=0.5)


def trained(tx, f, steps, start=stacked):
    """Released and plain, [params, opt_state, gradient of x, loss] after some steps each.

    `per_layer=True` leaves out the probe for coupled parameters: test_release_refuses has it.
    """
    stack = release(tx, per_layer=True)
    layers = jax.jit(stack.init)(start())
    state = (start(), layers.opt_state)
    for i in range(steps):
        layers, *mine = released_step(stack, f, layers, inputs(i))
        state, *theirs = plain_step(tx, f, state, inputs(i))
    layers.check()
    return [layers.params, layers.opt_state, *mine], [*state, *theirs]


def chosen(*default, leave=()):
    """Rows of optimizers. A few are the default: test_release_carriers has all dtypes of states."""
    return [
        pytest.param(name, marks=() if name in default else pytest.mark.slow)
        for name in TXS
        if name not in leave
    ]


# A logarithm of XLA for CPUs can differ in the last bit between a vector and a stack of vectors.
@pytest.mark.parametrize("name", chosen(leave=("coat",)))
def test_op_by_op_the_bits_are_those_of_the_plain_update(name):
    with jax.disable_jit():
        assert_same_bits(*trained(TXS[name], body, 2))


@pytest.mark.parametrize(
    ("moments", "remat"),
    [
        (SGD, True),
        (with_moment_formats(SGD, {"trace": BFloat16("stochastic")}), False),
        pytest.param(SGD, False, marks=pytest.mark.slow),
    ],
    ids=["float32-rematerialized", "stochastic-saved", "float32-saved"],
)
def test_compiled_the_bits_are_those_of_the_plain_update(moments, remat):
    """Products with powers of two: the same bits, whether or not XLA contracts them."""
    tx = with_master_weights(moments, master=BFloat16Plus(bits=8))
    mine, theirs = trained(tx, jax.checkpoint(body) if remat else body, 3)
    assert_same_bits(mine, theirs)
    assert np.any(mine[0]["up"] != stacked()["up"])


@pytest.mark.parametrize("name", chosen("fp8-lm", "masters in float16"))
def test_compiled_the_numbers_are_close(name):
    mine, theirs = trained(TXS[name], body, 3)
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
        # The last bit of a moment can move a code by 1, and a weight by a remainder of 1 or 256.
        if np.issubdtype(np.asarray(y).dtype, np.integer):
            continue
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 * max(np.max(np.abs(y)), 1e-30))


def test_without_a_gradient_it_is_the_scan_of_jax():
    stack = release(optax.adam(1e-3))
    layers = jax.jit(stack.init)(stacked())
    mine = jax.jit(functools.partial(stack.scan, body))(inputs(0), layers)
    theirs = jax.jit(functools.partial(jax.lax.scan, body))(inputs(0), stacked())
    assert_same_bits(mine, theirs)
    # Gradients of other arrays alone leave the layers as they are.
    loss_fn = lambda x, layers: loss_of(stack.scan, body, layers, x)
    plain = lambda x: loss_of(jax.lax.scan, body, stacked(), x)
    assert_same_bits(
        jax.jit(jax.grad(loss_fn))(inputs(0), layers), jax.jit(jax.grad(plain))(inputs(0))
    )


def test_gradients_of_everything_else():
    """A carry of a tree, arrays of integers, other xs, ys, and what the body closes over."""
    stack = release(SGD)
    layers = jax.jit(stack.init)(stacked())
    rest = {"scale": jnp.float32(0.5), "bias": jnp.linspace(0.0, 1.0, L), "first": inputs(0)}

    def loss_fn(scan, layers, rest):
        def f(carry, of_layer):
            (p, bias), (x, count) = of_layer, carry
            x, _ = body(x, p)
            x = x + rest["scale"] * bias * jnp.float32(count)
            return (x, count + 1), (jnp.sum(x**2), count)

        (x, count), (sums, counts) = scan(f, (rest["first"], 1), (layers, rest["bias"]))
        return jnp.mean(x**2) + 0.1 * jnp.sum(sums) + count, counts

    def grads(scan, layers):
        return jax.value_and_grad(functools.partial(loss_fn, scan), argnums=(0, 1), has_aux=True)(
            layers, rest
        )

    (loss, counts), (new, others) = jax.jit(functools.partial(grads, stack.scan))(layers)
    (loss_, counts_), (plain, others_) = jax.jit(functools.partial(grads, jax.lax.scan))(stacked())
    params, opt_state = updates_of(SGD)(plain, layers.opt_state, stacked())
    assert_same_bits((loss, counts), (loss_, counts_))
    np.testing.assert_array_equal(counts, np.arange(1, L + 1))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), others, others_)
    for x, y in zip(
        jax.tree.leaves((new.params, new.opt_state)),
        jax.tree.leaves((params, opt_state)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "remat"),
    [
        pytest.param(fp8.recipes.delayed(), False, id="delayed-saved"),
        *(
            pytest.param(fp8.recipes.get(name), remat, id=f"{name}-{how}", marks=pytest.mark.slow)
            for name, remat, how in (
                ("delayed", True, "rematerialized"),
                ("blockwise", False, "saved"),
                ("blockwise", True, "rematerialized"),
            )
        ),
    ],
)
def test_layers_in_fp8(recipe, remat):
    """Quantizer state leaves the loss as always, beside the next layers."""
    tx = with_master_weights(SGD, master=BFloat16Plus(bits=8))
    stack = release(tx, per_layer=True)
    params = {name: w.astype(jnp.bfloat16) for name, w in stacked().items() if name != "b"}
    one = dict.fromkeys(params, fp8.init_state(recipe) if recipe.rows else ())
    states = jax.tree.map(lambda x: np.stack([x] * L), one)

    def f(x, of_layer):
        w, state = of_layer
        dot = lambda x, name: fp8.dot(x, w[name], recipe=recipe, state=state[name] or None)
        return x + dot(jnp.tanh(dot(x, "up")), "down"), None

    f = jax.checkpoint(f) if remat else f

    def loss_fn(scan, params, states, x):
        y, _ = scan(f, params["scale"].astype(x.dtype) * x, (params["layers"], states))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def run(scan, layers, states, x):
        tree = {"layers": layers, "scale": jnp.bfloat16(0.5)}
        return fp8.value_and_grad(functools.partial(loss_fn, scan))(tree, states, x)

    @jax.jit
    def plain_update(grads, opt_state, params):
        updates, opt_state = jax.vmap(tx.update)(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    released_run, plain_run = (
        jax.jit(functools.partial(run, s)) for s in (stack.scan, jax.lax.scan)
    )
    layers, plain, mine, theirs = jax.jit(stack.init)(params), params, states, states
    opt_state = layers.opt_state
    for i in range(2):
        x = inputs(i)  # in bfloat16 XLA for CPUs does not round in the same places
        loss, grads, mine = released_run(layers, mine, x)
        layers = grads["layers"]
        loss_, grads_, theirs = plain_run(plain, theirs, x)
        plain, opt_state = plain_update(grads_["layers"], opt_state, plain)
        assert_same_bits((loss, grads["scale"], mine), (loss_, grads_["scale"], theirs))
    assert_same_bits((layers.params, layers.opt_state), (plain, opt_state))


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "rematerialized"])
def test_what_the_body_closes_over_is_not_kept_for_each_layer(remat):
    """No stack of masks exists. Keys are xs, and the loss is a checkpoint."""
    stack = release(SGD, per_layer=True)
    layers, keys = jax.jit(stack.init)(stacked()), jax.random.split(jax.random.key(1), L)
    mask, table = jnp.eye(4, 8) > 0, jnp.linspace(0.0, 1.0, 32).reshape(4, 8)

    def grads(scan, layers, keys, mask, table):
        def f(x, of_layer):
            p, key = of_layer
            x, _ = body(jnp.where(mask, x * table, x), p)
            return jax.lax.select(jax.random.bernoulli(key), x, 0.5 * x), None

        f = jax.checkpoint(f) if remat else f
        run = lambda layers: loss_of(scan, f, (layers, keys), inputs(0))
        return jax.grad(jax.checkpoint(run))(layers)

    arguments, mine = (keys, mask, table), functools.partial(grads, stack.scan)
    program = str(jax.make_jaxpr(mine)(layers, *arguments))
    assert "f32[3,4,8]" in program  # x of each layer
    assert "bool[3,4,8]" not in program
    new = jax.jit(mine)(layers, *arguments)
    plain = jax.jit(functools.partial(grads, jax.lax.scan))(stacked(), *arguments)
    assert_same_bits(
        (new.params, new.opt_state), updates_of(SGD)(plain, layers.opt_state, stacked())
    )


def test_a_state_that_nothing_collects_is_refused():
    recipe = fp8.recipes.delayed()
    stack = release(SGD)
    layers = jax.jit(stack.init)(stacked())
    states = jax.tree.map(lambda x: jnp.stack([x] * L), fp8.init_state(recipe))

    def loss_fn(layers, states):
        f = lambda x, s: (fp8.dot(x, s[0]["up"] @ s[0]["down"], recipe=recipe, state=s[1]), None)
        return jnp.sum(stack.scan(f, inputs(0), (layers, states))[0])

    with pytest.raises(fp8.FP8StateError, match="value_and_grad"):
        jax.grad(loss_fn)(layers, states)


def test_schedules_count_in_each_layer():
    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.5})
    tx = optax.chain(optax.trace(0.0), optax.scale_by_learning_rate(schedule))
    mine, theirs = trained(tx, body, 3)
    np.testing.assert_array_equal(mine[1][1].count, [3] * L)
    assert_same_bits(mine, theirs)


def test_clipping_per_layer():
    """All numbers are exact, so the bits are equal, however XLA orders products and sums."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), SGD)
    of_one = {"up": np.float32([2, -2, 2]), "down": np.float32([1, 1, -1, 1])}  # of norm 4
    sizes = np.float32([[1], [1 / 16], [4]])
    grads = jax.tree.map(lambda x: x * sizes, of_one)
    start = jax.tree.map(np.zeros_like, grads)
    stack = release(tx, per_layer=True)

    def f(x, of_layer):
        products = jax.tree.map(lambda p, g: jnp.sum(p * g), *of_layer)
        return x + products["up"] + products["down"], None

    loss_fn = lambda layers: stack.scan(f, jnp.float32(0.0), (layers, grads))[0]
    layers = jax.jit(stack.init)(start)
    step, (params, opt_state) = jax.jit(jax.grad(loss_fn)), (start, layers.opt_state)
    for _ in range(2):
        layers = step(layers)
        params, opt_state = updates_of(tx)(grads, opt_state, params)
    assert_same_bits((layers.params, layers.opt_state), (params, opt_state))
    # This momentum takes steps of 1 and 1.5 gradients. Layer 1 alone is below the norm.
    share = np.asarray(params["down"])[:, 0] / (-2.5 * 2.0**-7 * grads["down"][:, 0])
    np.testing.assert_array_equal(share, [1 / 4, 1, 1 / 16])


def test_apply_if_finite_skips_a_layer_alone():
    """The gradient of w in layer i is s[i]."""
    stack = release(optax.apply_if_finite(optax.sgd(1.0), 5))
    layers = jax.jit(stack.init)({name: np.ones((L, 2), np.float32) for name in ("w", "b")})
    s = jnp.array([1.0, jnp.inf, 2.0])

    def loss_fn(layers):
        f = lambda x, of_layer: (x + of_layer[0]["w"] * of_layer[1] + of_layer[0]["b"], None)
        return jnp.sum(stack.scan(f, jnp.ones(2), (layers, s))[0])

    layers = jax.jit(jax.grad(loss_fn))(layers)
    np.testing.assert_array_equal(layers.params["w"][:, 0], [0, 1, -1])
    np.testing.assert_array_equal(layers.params["b"][:, 0], [0, 1, 0])
    np.testing.assert_array_equal(layers.opt_state.notfinite_count, [0, 1, 0])


def test_seeds_of_stochastic_rounding_differ_from_layer_to_layer():
    tx = with_moment_formats(optax.trace(0.5), {"trace": BFloat16("stochastic")})
    init = jax.jit(release(tx, per_layer=True).init)
    seeds = init({"w": np.ones((L, 4), np.float32)}).opt_state.seed
    assert len({*map(int, seeds)}) == L


def test_master_weights_of_stacked_layers():
    """`init_master_weights` of each layer, then `pack`; and back."""
    tx = with_master_weights(optax.adam(1e-3), master=BFloat16Plus(bits=8))
    init = jax.vmap(functools.partial(init_master_weights, tx))
    params, opt_state = jax.jit(init)(stacked())
    layers = release(tx, per_layer=True).pack(params, opt_state)
    assert_same_bits((layers.params, layers.opt_state), (params, opt_state))


def test_donated_layers_are_updated_in_their_memory():
    tx = with_moment_formats(optax.adam(1e-3), {"mu": Int8(min_size=0)})
    stack = release(tx, per_layer=True)
    layers = jax.eval_shape(stack.init, stacked())
    step = jax.jit(
        jax.grad(lambda layers, x: loss_of(stack.scan, body, layers, x)), donate_argnums=0
    )
    step = step.lower(layers, inputs(0)).compile()
    assert step.memory_analysis().alias_size_in_bytes >= sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(layers)
    )


def test_linen_modules():
    """The parameters that `nn.scan` stacks."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(8)(jnp.tanh(nn.Dense(16)(x))), None

    scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)()
    params = jax.jit(scanned.init, static_argnums=2)(jax.random.key(0), inputs(0), None)["params"]
    stack = release(SGD, per_layer=True)
    f = lambda x, p: Layer().apply({"params": p}, x, None)
    layers = jax.jit(stack.init)(params)
    opt_state = layers.opt_state
    layers = jax.jit(jax.grad(lambda layers: jnp.sum(stack.scan(f, inputs(0), layers)[0])))(layers)
    loss_fn = lambda p: jnp.sum(scanned.apply({"params": p}, inputs(0), None)[0])
    new, _ = updates_of(SGD)(jax.jit(jax.grad(loss_fn))(params), opt_state, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), layers.params, new)
    assert np.any(layers.params["Dense_0"]["kernel"] != params["Dense_0"]["kernel"])


def test_nnx_modules():
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked_layers(rngs):
        return nnx.Linear(8, 8, rngs=rngs)

    graphdef, params = nnx.split(nnx.jit(lambda: stacked_layers(nnx.Rngs(0).split(L)))())
    stack = release(SGD, per_layer=True)
    f = lambda x, p: (x + jnp.tanh(nnx.merge(graphdef, p)(x)), None)
    layers = jax.jit(stack.init)(params)
    opt_state = layers.opt_state
    layers = jax.jit(jax.grad(lambda layers: loss_of(stack.scan, f, layers, inputs(0))))(layers)
    grads = jax.jit(jax.grad(lambda p: loss_of(jax.lax.scan, f, p, inputs(0))))(params)
    new, _ = updates_of(SGD)(grads, opt_state, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), layers.params, new)
    assert np.any(layers.params["kernel"][...] != params["kernel"][...])


def test_memory_report_tells_weights_masters_and_moments_apart():
    tx = with_master_weights(adamw(1e-3, mu=Int8(min_size=0)), master=BFloat16Plus(bits=8))
    stack = release(tx, per_layer=True)
    layers = jax.jit(stack.init)({"w": np.ones((3, 128, 256), jnp.bfloat16)})

    def loss_fn(layers, x):
        y, _ = stack.scan(lambda x, p: (x + 0 * p["w"][0, 0], None), x, layers)
        return jnp.sum(y)

    step = lambda layers, x: jax.grad(loss_fn)(layers, x)
    report = fp8.memory_report(step, layers, jnp.ones(4, jnp.bfloat16))
    state = layers.opt_state
    bytes_of = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert report.fp8["weights"] == layers.params["w"].nbytes
    assert report.fp8["master weights"] == bytes_of(state.masters)
    assert report.fp8["moments"] == bytes_of(state.inner)
