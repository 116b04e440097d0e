"""Bytes of small train steps by kind, counted by hand and by XLA."""

import functools
import io
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hard_inputs import mentions
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jaxfp8 as fp8
from jaxfp8.diagnostics._memory_report import memory_report
from jaxfp8.diagnostics._memory_table import MemoryReport
from jaxfp8.linen import COLLECTION, FP8Dense, TrainState
from jaxfp8.nnx import FP8Linear
from jaxfp8.optim import BFloat16Plus, MasterWeightsState, init_master_weights, with_master_weights
from jaxfp8.state._high_precision import high_precision

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax.adam needs it

DELAYED, IDENTITY = fp8.recipes.delayed(), fp8.recipes.identity()
L, B, D = 4, 64, 32  # layers, batch, features
W = L * D * D  # elements of the weights
STATE = 3 * 4 + 3 * 16 * 4 + 3 * 4 + 3 * 4  # of one matmul: scales, history, counts, fingerprints
ADAM = optax.adam(1e-3)


def stack(recipe=DELAYED, remat=True):
    """`loss(w, state, x)` of a scan over L layers, each a matmul and a ReLU."""

    def loss(w, state, x):
        def layer(x, ws):
            w, state = ws
            return jax.nn.relu(fp8.dot(x, w, recipe=recipe, state=state)), None

        y, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (w, state))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return loss


def stacked_state(recipe=DELAYED):
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (L, *a.shape)), fp8.init_state(recipe))


def train_step(loss, tx=ADAM):
    def step(w, opt_state, state, x):
        value, grads, state = fp8.value_and_grad(loss)(w, state, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return value, optax.apply_updates(w, updates), opt_state, state

    return jax.jit(step, donate_argnums=(0, 1, 2))


def arguments(recipe=DELAYED, tx=ADAM):
    w = jnp.ones((L, D, D))  # float32: XLA for CPUs would widen the residuals of bfloat16
    return w, tx.init(w), stacked_state(recipe), jnp.ones((B, D))


def sums(compiled):
    """What XLA allocates: for arguments, temporaries, and other results."""
    stats = compiled.memory_analysis()
    other = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes, stats.temp_size_in_bytes, other


def check_sums(kinds, compiled):
    at = dict.fromkeys(
        ("weights", "master weights", "moments", "quantizer state", "other arguments"), 0
    )
    in_arguments = sum(kinds.get(kind, 0) for kind in at)
    in_temporary = sum(kinds[kind] for kind in ("gradients", "residuals", "temporaries"))
    assert (in_arguments, in_temporary, kinds["results"]) == sums(compiled)
    assert min(kinds.values()) >= 0


def test_a_scanned_stack_counted_by_hand():
    step, given = train_step(stack()), arguments()
    report = memory_report(step, *given)
    assert report.fp8["weights"] == 4 * W
    assert report.fp8["moments"] == 2 * 4 * W + 4
    assert report.fp8["quantizer state"] == L * STATE
    assert report.fp8["other arguments"] == 4 * B * D
    check_sums(report.fp8, step.lower(*given).compile())
    # The gradients of all layers. Under jax.checkpoint a layer keeps its input.
    assert report.twin is not None
    assert report.twin["gradients"] == report.fp8["gradients"] == 4 * W
    assert report.twin["residuals"] == pytest.approx(4 * L * B * D, rel=0.02)
    assert report.twin["quantizer state"] == 0


def test_the_twin_is_the_step_with_identity():
    report = memory_report(train_step(stack()), *arguments())
    by_hand = memory_report(train_step(stack(IDENTITY)), *arguments(IDENTITY), twin=False)
    assert report.twin == by_hand.fp8
    assert by_hand.twin is None
    other = memory_report(
        train_step(stack()), *arguments(), twin=(train_step(stack(IDENTITY)), arguments(IDENTITY))
    )
    assert other.to_dict() == report.to_dict()


def test_microbatches_sum_their_gradients():
    loss = stack()

    def step(w, state, batches):
        def one(carry, x):
            summed, seen = carry
            _, grads, more = fp8.value_and_grad(loss, commit=False)(w, state, x)
            return (summed + grads.astype(jnp.float32), fp8.merge_seen(seen, more)), None

        start = jnp.zeros(w.shape, jnp.float32), fp8.nothing_seen(state)
        (summed, seen), _ = jax.lax.scan(one, start, batches)
        return (w - 0.1 * summed).astype(w.dtype), fp8.commit(state, seen)

    w, _, state, x = arguments()
    report = memory_report(
        jax.jit(step, donate_argnums=(0, 1)), w, state, jnp.stack([x, x]), twin=False
    )
    # The sum in float32, and the gradients of one microbatch.
    assert report.fp8["gradients"] in (4 * W, (4 + 4) * W)


def test_gradients_that_a_step_returns():
    w, _, state, x = arguments()
    report = memory_report(jax.jit(fp8.value_and_grad(stack())), w, state, x)
    check = jax.jit(fp8.value_and_grad(stack())).lower(w, state, x).compile()
    assert report.fp8["gradients"] == 4 * W
    assert sum(report.fp8.values()) == sum(sums(check))
    assert report.fp8["results"] < report.fp8["gradients"]


def linen_step(recipe):
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = functools.partial(FP8Dense, use_bias=False, recipe=recipe)
            return dense(D)(nn.relu(dense(2 * D)(x)))

    model, x = MLP(), jnp.ones((B, D))
    variables = model.init(jax.random.key(0), x)
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


@pytest.mark.parametrize(("bits", "master"), [(16, 4), (8, 3)])
def test_primary_weights(bits, master):
    report = memory_report(*primary_step(fp8.recipes.blockwise(), bits))
    assert report.fp8["weights"] == D * D + 4  # one tile
    assert report.fp8["master weights"] == master * D * D
    assert report.fp8["moments"] == 4 * D * D
    assert report.twin is not None
    assert report.twin["weights"] == 2 * D * D


def test_shards_of_a_mesh():
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2
    )

    def on_mesh(tree, spec):
        def leaf(x):
            at = spec if x.ndim == len(spec) else P()
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, at))

        return jax.tree.map(leaf, tree)

    w, opt_state, state, x = arguments()
    split = P(None, "fsdp", "tensor")
    given = (
        *(on_mesh(tree, split) for tree in (w, opt_state)),
        on_mesh(state, P()),
        on_mesh(x, P("fsdp", None)),
    )
    step = train_step(stack())
    report = memory_report(step, *given)
    assert report.fp8["weights"] == 4 * W // 8
    assert report.fp8["moments"] == 2 * 4 * W // 8 + 4
    assert report.fp8["quantizer state"] == L * STATE
    assert report.fp8["other arguments"] == 4 * B * D // 4
    assert report.twin is not None
    assert report.twin["residuals"] > 0
    assert report.twin["gradients"] > 0
    check_sums(report.fp8, step.lower(*given).compile())


def test_caches_of_traces_do_not_mix():
    """An inner jit and a scan: the twin has no FP8 in it, and the step has it afterwards, too."""
    inner = jax.jit(stack())
    step, given = train_step(lambda w, state, x: inner(w, state, x)), arguments()
    for _ in range(2):
        assert "f8E4M3" in step.lower(*given).as_text()
        with high_precision():
            assert "f8E4M3" not in step.lower(*given).as_text()
    before = step(*arguments())[0]
    report = memory_report(step, *given)
    assert memory_report(step, *given).to_dict() == report.to_dict()
    assert step(*arguments())[0] == before


def test_static_arguments_and_named_kinds():
    @functools.partial(jax.jit, static_argnums=0)
    def step(name, w, ema, x):
        del name
        grads = jax.grad(lambda w: jnp.sum(x @ w))(w)
        return w - grads, 0.9 * ema + w

    w, x = jnp.ones((D, D)), jnp.ones((B, D))
    with pytest.raises(
        ValueError, match=mentions("2 trees", "positions 0, 1", "argument_kinds=('weights', None")
    ):
        memory_report(step, "name", w, w, x)
    report = memory_report(
        step, "name", w, w, x, argument_kinds=("weights", "moments", None), twin=False
    )
    assert (report.fp8["weights"], report.fp8["moments"]) == (4 * D * D, 4 * D * D)
    tree = jax.jit(lambda both, x: (both["w"], both["ema"], x))
    both = {"w": w, "ema": w}
    kinds = ({"w": "weights", "ema": None}, None)
    assert memory_report(tree, both, x, argument_kinds=kinds).fp8["weights"] == 4 * D * D


@pytest.mark.parametrize(
    ("kinds", "complaint"),
    [
        (("weights",), ("has 1 entries", "takes 2 arguments", "None where")),
        (("weight", None), ("argument_kinds[0]", "'weight'", "'weights', 'master weights'")),
    ],
)
def test_kinds_that_do_not_fit(kinds, complaint):
    with pytest.raises(ValueError, match=mentions(*complaint)):
        memory_report(lambda w, x: w, jnp.ones(2), jnp.ones(3), argument_kinds=kinds)


def test_a_step_without_weights():
    with pytest.raises(ValueError, match=mentions("cannot tell", "returns no tree of arrays")):
        memory_report(lambda w, x: jnp.sum(w) + jnp.sum(x), jnp.ones(2), jnp.ones(3))


def test_a_twin_that_fails():
    q = fp8.quantize(jnp.ones((D, D)), fp8.E4M3, fp8.PerTensor())
    with pytest.raises(AttributeError) as caught:
        memory_report(lambda q: (q, q.dequantize()), q)
    assert any("twin=(step, args)" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match=mentions("twin=3", "(step, args)")):
        memory_report(lambda q: (q, q.dequantize()), q, twin=3)


def test_tables():
    kinds = {"weights": 3 * 2**30, "moments": 0, "residuals": 2**29}
    report = MemoryReport(kinds, kinds | {"residuals": 2**30})
    assert [row.kind for row in report.rows] == ["weights", "residuals", "total"]
    assert report.rows[1].ratio == 0.5
    assert "residuals       0.50                  1.00   0.50" in str(report)
    small = MemoryReport({"weights": 2**30, "quantizer state": 64})
    assert "quantizer state      <0.01" in str(small)
    assert report.to_dict()["high_precision/total"] == 2**32
    console = Console(file=io.StringIO(), width=100)
    console.print(report)
    assert "FP8 (GiB)" in console.file.getvalue()
    alone = MemoryReport({"weights": 8, "quantizer state": 12})
    assert str(alone).splitlines()[0].split() == ["kind", "FP8", "(B)"]
    assert alone.to_dict()["fp8/quantizer_state"] == 12
