"""`memory_report` finds what an argument is: linen, nnx, master weights, weights in FP8."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hard_inputs import mentions
from memory_cases import ADAM, DELAYED, IDENTITY, STATE, B, D, check_sums

import jaxfp8 as fp8
from jaxfp8.diagnostics._memory_report import memory_report
from jaxfp8.linen import COLLECTION, FP8Dense, TrainState
from jaxfp8.nnx import FP8Linear
from jaxfp8.optim import BFloat16Plus, MasterWeightsState, init_master_weights, with_master_weights

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax.adam needs it


def linen_step(recipe):
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = functools.partial(FP8Dense, use_bias=False, recipe=recipe)
            return dense(D)(nn.relu(dense(2 * D)(x)))

    model, x = MLP(), jnp.ones((B, D))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    ts = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        fp8_state=variables.get(COLLECTION, {}),
        tx=optax.adamw(1e-3),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(ts, x):
        def loss(params, state, x):
            return jnp.mean(ts.apply_fn({"params": params, COLLECTION: state}, x) ** 2)

        _, grads, state = fp8.value_and_grad(loss)(ts.params, ts.fp8_state, x)
        return ts.apply_gradients(grads=grads, fp8_state=state)

    return step, ts, x, variables


MLP_WEIGHTS = 4 * 2 * D * 2 * D
MLP = {
    "weights": MLP_WEIGHTS,
    "moments": 2 * MLP_WEIGHTS + 4,
    "quantizer state": 2 * STATE,
    "other arguments": 4 * B * D + 4,  # and the number of the step
}


def test_linen():
    step, ts, x, _ = linen_step(DELAYED)
    report = memory_report(step, ts, x)
    assert {kind: report.fp8[kind] for kind in MLP} == MLP
    check_sums(report.fp8, step.lower(ts, x).compile())
    step, ts, x, _ = linen_step(IDENTITY)
    assert report.twin == memory_report(step, ts, x, twin=False).fp8


def test_linen_variables():
    *_, x, variables = linen_step(DELAYED)
    report = memory_report(lambda variables, x: (variables, x), variables, x, twin=False)
    assert report.fp8["weights"] == MLP_WEIGHTS
    assert report.fp8["quantizer state"] == 2 * STATE


class NnxMLP(nnx.Module):
    def __init__(self, recipe):
        linear = functools.partial(
            FP8Linear, use_bias=False, recipe=recipe, rngs=nnx.Rngs(0), param_dtype=jnp.float32
        )
        self.up, self.down = linear(D, 2 * D), linear(2 * D, D)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def nnx_step(model, optimizer, x):
    _, grads = fp8.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
    optimizer.update(model, grads)


def nnx_arguments(recipe):
    model = NnxMLP(recipe)
    return (
        model,
        nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param),
        jnp.ones((B, D)),
    )


def test_nnx():
    given = nnx_arguments(DELAYED)
    report = memory_report(nnx_step, *given)
    # flax's optimizer counts its steps, too.
    expected = MLP | {"moments": MLP["moments"] + 4, "other arguments": 4 * B * D}
    assert {kind: report.fp8[kind] for kind in MLP} == expected
    check_sums(report.fp8, nnx_step.lower(*given).compile().compiled)
    assert report.twin == memory_report(nnx_step, *nnx_arguments(IDENTITY), twin=False).fp8


def test_gradients_that_optax_accumulates():
    """The fields of its state have another order in nnx than in jax."""
    model, _, x = nnx_arguments(DELAYED)
    optimizer = nnx.Optimizer(model, optax.MultiSteps(ADAM, 2), wrt=nnx.Param)
    fp8_bytes = memory_report(nnx_step, model, optimizer, x, twin=False).fp8
    assert fp8_bytes["weights"] == MLP_WEIGHTS
    assert fp8_bytes["moments"] == 2 * MLP_WEIGHTS + 4 * 4
    assert fp8_bytes["gradients"] >= MLP_WEIGHTS


def test_modules_that_share_variables():
    model, _, x = nnx_arguments(DELAYED)
    step = nnx.jit(lambda one, other, x: jnp.sum(one(x) + other(x)))
    with pytest.raises(ValueError, match=mentions("0 arrays for a NnxMLP", "nnx.split")):
        memory_report(step, model, model, x)


class Carry(NamedTuple):
    params: Any
    slow: Any


def test_a_named_tuple_of_the_user():
    w, x = jnp.ones((D, D)), jnp.ones((B, D))
    step = lambda carry, x: Carry(carry.params - jnp.mean(x), carry.slow + carry.params)
    report = memory_report(step, Carry(w, w), x, twin=False)
    assert report.fp8["weights"] == 4 * D * D
    assert report.fp8["other arguments"] == 4 * D * D + 4 * B * D


def test_nnx_in_jax_jit():
    model, optimizer, x = nnx_arguments(DELAYED)
    graph, *variables = nnx.split((model, optimizer), nnx.Param, ...)

    def step(params, rest, x):
        model, optimizer = nnx.merge(graph, params, rest)
        nnx_step(model, optimizer, x)
        return nnx.state((model, optimizer))

    report = memory_report(step, *variables, x, twin=False)
    assert report.fp8["weights"] == MLP_WEIGHTS
    assert report.fp8["moments"] == MLP["moments"] + 4
    assert report.fp8["quantizer state"] == 2 * STATE


def test_master_weights():
    def step(w, opt_state, x):
        grads = jax.grad(lambda w: jnp.sum((x @ w) ** 2).astype(jnp.float32))(w)
        adam, own = opt_state.inner
        adam = adam._replace(mu=adam.mu + grads, nu=adam.nu + grads)
        masters = opt_state.masters - adam.mu.astype(jnp.float32)
        return masters.astype(w.dtype), MasterWeightsState(masters, (adam, {"m": own["m"] + 1}))

    w, x = jnp.ones((D, D), jnp.bfloat16), jnp.ones((B, D), jnp.bfloat16)
    opt_state = MasterWeightsState(w.astype(jnp.float32), (ADAM.init(w)[0], {"m": jnp.ones(3)}))
    report = memory_report(step, w, opt_state, x, twin=False)
    assert report.fp8["weights"] == 2 * D * D
    assert report.fp8["master weights"] == 4 * D * D
    assert report.fp8["moments"] == 2 * 2 * D * D + 4 + 3 * 4


def test_weights_in_fp8():
    def step(params, opt_state, x):
        w = params["w"]
        if isinstance(w, fp8.QuantizedTensor):
            w = w.dequantize()
        y = fp8.dot(x, w, recipe=fp8.recipes.current()) + params["b"]
        return params, opt_state, jnp.sum(y) + jnp.sum(opt_state.trace.dequantize())

    q = fp8.quantize(jnp.ones((D, D), jnp.bfloat16), fp8.E4M3, fp8.PerTensor())
    params, x = {"w": q, "b": jnp.ones(D)}, jnp.ones((B, D), jnp.bfloat16)
    moments = optax.TraceState(trace=q)  # keeps its FP8 in the twin
    report = memory_report(step, params, moments, x)
    assert report.fp8["weights"] == D * D + 4 + 4 * D
    assert report.twin is not None
    assert report.twin["weights"] == 2 * D * D + 4 * D
    assert report.fp8["moments"] == report.twin["moments"] == D * D + 4


def primary_step(recipe, bits, donate=True):
    """A step with FP8 primary weights or, without a recipe, with bfloat16 weights. With types."""
    tx = with_master_weights(optax.sgd(0.1, momentum=0.9), master=BFloat16Plus(bits=bits))
    exact = {"w": jnp.ones((D, D))}
    rules = [("w", fp8.weights.WeightAxes())]
    used = fp8.recipes.identity() if recipe is None else recipe

    def start(exact):
        if recipe is None:
            return init_master_weights(tx, exact)
        like = fp8.quantize_params(exact, recipe, rules=rules, primary=True, dtype=jnp.bfloat16)
        return init_master_weights(tx, exact, weights=like)

    def loss_fn(params, state, x):
        return jnp.sum(fp8.dot(x, params["w"], recipe=used).astype(jnp.float32) ** 2)

    def step(params, opt_state, x):
        loss, grads, _ = fp8.value_and_grad(loss_fn)(params, (), x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    x = jax.ShapeDtypeStruct((B, D), jnp.bfloat16)
    return jax.jit(step, donate_argnums=(0, 1)), *jax.eval_shape(start, exact), x


@pytest.mark.parametrize(("bits", "master"), [pytest.param(16, 4, marks=pytest.mark.slow), (8, 3)])
def test_primary_weights(bits, master):
    kinds = ({"w": None}, None, None)  # what is found, for each weight
    report = memory_report(*primary_step(fp8.recipes.blockwise(), bits), argument_kinds=kinds)
    assert report.fp8["weights"] == D * D + 4  # one tile
    assert report.fp8["master weights"] == master * D * D
    assert report.fp8["moments"] == 4 * D * D
    assert report.twin is not None
    assert report.twin["weights"] == 2 * D * D
