"""Bytes of small train steps by kind, counted by hand and by XLA."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hard_inputs import mentions
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from memory_cases import IDENTITY, STATE, B, D, L, W, arguments, check_sums, stack, sums, train_step
from rich.console import Console

import jaxfp8 as fp8
from jaxfp8.diagnostics._arguments import kinds_of
from jaxfp8.diagnostics._memory_report import MemoryReport, memory_report
from jaxfp8.state._value_and_grad import high_precision

IN_FP8 = fp8.quantize_params({"kernel": jnp.ones((4, 4))}, fp8.recipes.current(), primary=True)[
    "kernel"
]
PARAMS = {"w": IN_FP8, "b": jnp.ones(2), "none": None}

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax.adam needs it


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
        ((1, None), ("argument_kinds[0]", "holds 1;", "'weights', 'master weights'")),
        (
            ({"v": "weights"}, None),
            ("argument_kinds[0] does not fit", "['v']", "jax.tree.map(lambda _: 'weights', arg"),
        ),
        (([None], None), ("argument_kinds[0] does not fit", "Expected list")),
    ],
)  # fmt: skip
def test_kinds_that_do_not_fit(kinds, complaint):
    with pytest.raises(ValueError, match=mentions(*complaint)):
        memory_report(
            lambda w, x: w, {"w": IN_FP8, "b": jnp.ones(2)}, jnp.ones(3), argument_kinds=kinds
        )


@pytest.mark.parametrize(
    "named",
    [
        "weights", {"w": "weights", "b": "weights", "none": None},
        jax.tree.map(lambda _: "weights", PARAMS),
    ],
    ids=["one", "tree", "leaves"],
)  # fmt: skip
def test_named_kinds_of_trees_with_places_without_arrays(named):
    """None in a tree is no array: a field of an FP8 weight, or a parameter that is left out."""
    state = optax.masked(optax.trace(0.9), {"w": False, "b": True, "none": False}).init(
        {"w": jnp.ones((4, 4)), "b": jnp.ones(2), "none": None}
    )
    moments = jax.tree.map(lambda _: "moments", state)
    twin = {"w": jnp.ones((4, 4)), "b": jnp.ones(2), "none": None}  # weights in high precision
    for params, arrays in ((PARAMS, 2), (twin, 1)):
        given = [params, state]
        found = kinds_of(given, given, None, (named, moments))
        assert found == ["weights"] * (arrays + 1) + ["moments"]


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
