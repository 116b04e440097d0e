"""Experts in FP8 on every kind of mesh, against one device."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))
import moe_cases as cases
from moe_cases import RECIPES, E, assert_same, distance, specs_of

import jaxfp8 as fp8

SLOW = pytest.mark.slow
SPLIT = P("expert")
EXPERTS = fp8.moe.ExpertParallel(axis="expert", gradient_sent_in_fp8=True)


arrays = cases.arrays


@functools.cache
def states(name, stacked):
    return cases.states(RECIPES[name], stacked)


@functools.cache
def one_device(name, stacked):
    return jax.device_get(cases.program(name)(arrays(), states(name, stacked)))


def mesh_of(kind, **axes):
    count = np.prod(list(axes.values()))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes),
        devices=jax.devices()[:count],
    )  # fmt: skip


ALL = [("auto", 2), ("auto", 8), ("explicit", 4), ("manual", 1), ("manual", 8)]
SOME = [("auto", 8), ("explicit", 8), ("manual", 4)]
DEFAULT = {  # and a state for all experts; test_experts_and_data_axes has one of each
    ("blockwise", True, "auto", 8), ("delayed", False, "manual", 4),
}  # fmt: skip
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CASES = [
    pytest.param(
        name, stacked, *where,
        marks=() if (name, stacked, *where) in DEFAULT else pytest.mark.slow,
    )
    for name, stacked, places in (
        ("delayed", True, ALL), ("blockwise", True, ALL), ("mxfp8", True, SOME),
        ("delayed", False, SOME), ("current", True, SOME[:1]),
    )
    for where in places
]  # fmt: skip


def step_of_two(kind):
    """A step of delayed scaling on two devices, to be called with their mesh set."""
    mesh, run = mesh_of(AxisType.Auto, expert=2), functools.partial(cases.step, RECIPES["delayed"])
    step = lambda given, state: run(EXPERTS, given, state)
    if kind == "manual":
        specs = specs_of(RECIPES["delayed"], True, SPLIT)
        out = (SPLIT, (SPLIT,) * 4, specs[1], P())
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out)
    return mesh, step


@pytest.mark.parametrize("kind", ["auto", pytest.param("manual", marks=SLOW)])
def test_types_where_64_bits_are_on(kind):
    (x, gates, _, w_in, w_out, _), state = arrays(), states("delayed", True)
    want = x, (x, gates, w_in, w_out), state, np.int32(0)
    with jax.enable_x64(True):
        mesh, step = step_of_two(kind)
        with jax.set_mesh(mesh):
            found = jax.eval_shape(step, arrays(), state)
    types_of = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert types_of(found) == types_of(want)


@SLOW
@pytest.mark.parametrize("kind", ["auto", "manual"])
def test_arrays_of_32_bits_where_64_bits_are_on(kind):
    want = one_device("delayed", True)
    with jax.enable_x64(True):
        mesh, step = step_of_two(kind)
        with jax.set_mesh(mesh):
            got = jax.jit(step)(arrays(), states("delayed", True))
    assert got[0].dtype == jnp.bfloat16
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert distance(mine, other) < 1e-6


@functools.cache
def on_mesh(name, stacked, kind, devices):
    """The step on that mesh, compiled once."""
    recipe = RECIPES[name]
    if kind != "manual":
        return cases.program_of_global_arrays(
            name, KINDS[kind], data=1, experts=devices, backward=True, stacked=stacked
        )
    specs = specs_of(recipe, stacked, SPLIT)
    run = lambda given, state: cases.step(recipe, EXPERTS, given, state)
    mesh = mesh_of(AxisType.Auto, expert=devices)
    out = (SPLIT, (SPLIT,) * 4, specs[1], P())
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out))


@pytest.mark.parametrize(("name", "stacked", "kind", "devices"), CASES)
def test_any_number_of_devices_gives_the_same_bits(name, stacked, kind, devices):
    """Rows of an expert have one order on all meshes, so even the tiles of wgrad are the same."""
    got = on_mesh(name, stacked, kind, devices)(arrays(), states(name, stacked))
    assert_same(got, one_device(name, stacked))


DATA_AND_EXPERTS = [
    pytest.param(name, True, kind, marks=() if (name, kind) in default else SLOW)
    for default in [{("delayed", "explicit")}]
    for name in ("delayed", "mxfp8")
    for kind in ("auto", "explicit", "manual", "partly_manual")
]


@pytest.mark.parametrize(("name", "stacked", "kind"), DATA_AND_EXPERTS)
def test_experts_and_data_axes(name, stacked, kind):
    """Each expert has tokens on both devices of "data". Amaxes are those of all its tokens."""
    recipe, state = RECIPES[name], states(name, stacked)
    tokens = ("data", "expert")
    if kind in ("manual", "partly_manual"):
        parallel = fp8.moe.ExpertParallel(axis="expert", tokens=tokens)
        run = lambda given, state: cases.step(recipe, parallel, given, state)
        mesh = mesh_of(AxisType.Auto, data=2, expert=4)
        names = {"expert"} if kind == "partly_manual" else {"data", "expert"}
        specs = specs_of(recipe, stacked, SPLIT if kind == "partly_manual" else P(tokens))
        out = (specs[0][0], (specs[0][0],) * 2 + (SPLIT,) * 2, specs[1], P())
        on_mesh = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, axis_names=names)
        got = jax.jit(on_mesh)(arrays(), state)
    else:
        got = cases.program_of_global_arrays(name, KINDS[kind])(arrays(), state)
    want = one_device(name, stacked)
    assert_same((got[0], got[1][:2]), (want[0], want[1][:2]))
    if recipe.rows:
        assert_same(got[2], want[2])
    for mine, other in zip(got[1][2:], want[1][2:], strict=True):
        # The sum over devices is rounded. Tiles of mxfp8 along rows are others on each device.
        assert distance(mine, other) < (5e-3 if recipe.rows else 3e-2)


def test_a_partly_manual_mesh():
    """Its gradients are above, and slow."""
    run = functools.partial(fp8.moe.swiglu_experts, recipe=RECIPES["blockwise"])
    parallel = fp8.moe.ExpertParallel(axis="expert", tokens=("data", "expert"))
    on_mesh = jax.shard_map(
        lambda *given: run(*given, parallel=parallel).y,
        mesh=mesh_of(AxisType.Auto, data=2, expert=4),
        in_specs=SPLIT, out_specs=SPLIT, axis_names={"expert"},
    )  # fmt: skip
    assert_same(jax.jit(on_mesh)(*arrays()[:5]), one_device("blockwise", True)[0])


def untyped(name, stacked, axes, *, field="y", factor=None):
    """y or the count of dropped choices, with check_vma=False."""
    recipe, mesh = RECIPES[name], mesh_of(AxisType.Auto, expert=4)
    specs, of_states = specs_of(recipe, stacked, SPLIT)
    parallel = fp8.moe.ExpertParallel(axis="expert", capacity_factor=factor)

    def forward(x, gates, chosen, w_in, w_out, states):
        out = fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=recipe, states=states, parallel=parallel,
            reduce_axes=axes,
        )  # fmt: skip
        return getattr(out, field)

    on_mesh = jax.shard_map(
        forward, mesh=mesh, in_specs=(*specs[:5], of_states), check_vma=False,
        out_specs={"y": SPLIT, "dropped": P()}[field],
    )  # fmt: skip
    return jax.jit(on_mesh)(*arrays()[:5], states(name, stacked))


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=SLOW) for name in ("blockwise", "current")), "delayed"]
)
def test_without_types_axes_are_named(name):
    run = jax.jit(functools.partial(fp8.moe.swiglu_experts, recipe=RECIPES[name]))
    want = (
        one_device(name, True)[0]
        if RECIPES[name].rows
        else run(*arrays()[:5], states=states(name, True)).y  # its step is no other test's
    )
    assert_same(untyped(name, True, ()), want)


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_without_types_bad_axes_are_refused(name):
    """Axes that would mix experts, or leave tokens out, raise an error."""
    with pytest.raises(fp8.FP8StateError, match="reduce_axes"):
        untyped(name, True, None)
    with pytest.raises(fp8.FP8StateError, match="mix the amaxes"):
        untyped(name, True, ("expert",))
    if RECIPES[name].rows:
        with pytest.raises(fp8.FP8StateError, match="a state for each expert"):
            untyped(name, False, ("expert",))


def test_dropped_choices_are_those_of_all_devices_of_a_stage():
    """Without types, too. A stage of a pipeline has experts and a count of its own."""
    x, gates, chosen, w_in, w_out, _ = arrays()
    parallel = fp8.moe.ExpertParallel(axis="expert", capacity_factor=0.75)
    run = lambda *given: (
        fp8.moe.swiglu_experts(*given, recipe=RECIPES["blockwise"], parallel=parallel).dropped
    )
    given = x, gates, chosen, w_in, w_out
    mesh = mesh_of(AxisType.Auto, expert=4)
    want = int(jax.jit(jax.shard_map(run, mesh=mesh, in_specs=SPLIT, out_specs=P()))(*given))
    assert want > 0
    assert int(untyped("blockwise", True, None, field="dropped", factor=0.75)) == want
    mesh = mesh_of(AxisType.Auto, pipe=2, expert=4)
    # The second stage has all tokens at one expert.
    stages = [np.stack([each, each]) for each in given]
    stages[2][1] = [0, 1]

    def stage(*given):
        return run(*(each[0] for each in given))[None]

    split = P("pipe", "expert")
    on_mesh = jax.shard_map(stage, mesh=mesh, in_specs=split, out_specs=P("pipe"))
    found = jax.jit(on_mesh)(*stages)
    assert found.tolist() == [want, 4 * (128 - 24)]


def test_gates_and_tokens_may_be_the_same_on_some_devices():
    """Gradients are summed over devices that have other choices."""
    x, gates, chosen, w_in, w_out, g = arrays(jnp.float32)
    (x, gates, g), chosen = (each[:64] for each in (x, gates, g)), chosen[:128]
    mesh = mesh_of(AxisType.Auto, data=2)

    def loss(x, gates, chosen, g):
        parallel = fp8.moe.ExpertParallel(sent_in_fp8=False)
        y = fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=RECIPES["identity"], parallel=parallel
        ).y
        return jnp.sum(y * g)

    def on_device(x, gates, chosen, g):
        total = lambda x, gates: jax.lax.psum(loss(x, gates, chosen, g), "data")
        return jax.grad(total, argnums=(0, 1))(x, gates)

    got = jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P(), P("data"), P()), out_specs=P())
    )(x, gates, chosen, g)
    half = jax.jit(jax.grad(loss, argnums=(0, 1)))
    halves = [jax.device_get(half(x, gates, chosen[i : i + 64], g)) for i in (0, 64)]
    want = jax.tree.map(lambda a, b: a + b, *halves)
    for mine, other in zip(got, want, strict=True):
        assert distance(mine, other) < 1e-5


def test_bad_states_and_meshes_get_clear_errors():
    x, gates, chosen, w_in, w_out, _ = arrays()
    recipe = RECIPES["delayed"]
    x = jnp.asarray(x)  # its type shows the mesh
    run = lambda **options: fp8.moe.swiglu_experts(
        x, gates, chosen, w_in, w_out, recipe=recipe, **options
    )
    state = fp8.init_state(recipe)
    for wrong in ((state,), (state,) * 3, state, None):
        with pytest.raises(TypeError, match="must be a pair"):
            run(states=wrong)
    kinds = AxisType.Auto, AxisType.Explicit
    mixed = jax.make_mesh((2, 2), ("data", "expert"), axis_types=kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mixed), pytest.raises(ValueError, match="one kind"):
        run(parallel=EXPERTS)
    three = mesh_of(AxisType.Auto, expert=3)
    x, gates, chosen = x[:6], gates[:6], chosen[:6]
    with jax.set_mesh(three), pytest.raises(ValueError, match=r"experts=8.*multiple of 3"):
        run(parallel=EXPERTS, states=(state, state))
    for clamp in ((1.0,), (0.0, 1.0), (True, 1.0), "ab"):
        with pytest.raises(ValueError, match="clamp="):
            run(clamp=clamp, states=(state, state))


@pytest.mark.parametrize(
    ("name", "stacked", "kind", "devices"),
    [
        ("delayed", False, "manual", 4),
        pytest.param("current", True, "auto", 8, marks=SLOW),
        pytest.param("delayed", True, "auto", 8, marks=SLOW),
    ],
)
def test_an_amax_is_never_a_local_one(name, stacked, kind, devices):
    """The largest token of each expert is on another device than the expert."""
    x, gates, _, *others = arrays()
    chosen = (np.arange(x.shape[0], dtype=np.int32)[:, None] + np.int32([[0, 1]])) % E
    size = np.ones((x.shape[0], 1), np.float32)
    size[3], size[250] = 1000, 4000
    x = (x.astype(np.float32) * size).astype(x.dtype)
    step, state = cases.program(name), states(name, stacked)
    want = step((x, gates, chosen, *others), state)
    got = on_mesh(name, stacked, kind, devices)((x, gates, chosen, *others), state)
    assert_same(got, want)
    # A local amax would be smaller: without the tokens of other devices the result is another one.
    mine = x.shape[0] // devices
    local_x = np.where(np.arange(x.shape[0])[:, None] < mine, x, np.zeros_like(x))
    local = step((local_x, gates, chosen, *others), state)
    assert np.any(np.asarray(local[0][:mine]) != np.asarray(want[0][:mine]))


def test_tokens_that_devices_do_not_divide_are_refused():
    x, gates, chosen, w_in, w_out, _ = arrays()
    x, gates, chosen = x[:6], gates[:6], chosen[:6]
    with (
        jax.set_mesh(mesh_of(AxisType.Auto, expert=4)),
        pytest.raises(ValueError, match=r"6 tokens.*4 devices.*multiple of 4"),
    ):
        fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=RECIPES["blockwise"], parallel=EXPERTS
        )


def test_a_capacity_drops_last_choices_and_counts_them():
    x, gates, chosen, w_in, w_out, _ = arrays()
    all_of_it, _, _, none = jax.device_get(cases.program("blockwise")(arrays(), ((), ())))
    with jax.set_mesh(mesh_of(AxisType.Auto, expert=4)):
        limited = functools.partial(
            fp8.moe.swiglu_experts, recipe=RECIPES["blockwise"],
            parallel=fp8.moe.ExpertParallel(axis="expert", capacity_factor=0.75),
        )  # fmt: skip
        some = jax.device_get(jax.jit(limited)(x, gates, chosen, w_in, w_out))
    assert int(none) == 0
    # Each of 4 devices has 64 tokens, 128 choices and 24 slots for each of 4 devices.
    device = chosen.reshape(4, 128) // 2
    want = sum(max(0, int((of == peer).sum()) - 24) for of in device for peer in range(4))
    assert int(some.dropped) == want > 0
    # A token whose choices were all sent has the same result, and one that lost all has 0.
    same = (some.y == all_of_it).all(axis=1)
    assert same.sum() >= x.shape[0] - want


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"axis": "experts"}, ["'experts'", "jax.set_mesh"]),
        ({"axis": "expert", "tokens": ("data",)}, ["lacks axis='expert'", "Split tokens"]),
        ({"tokens": ["expert"]}, ["tokens=", "tuple"]),
        ({"axis": 3}, ["axis=3", "name"]),
        ({"capacity_factor": -1}, ["capacity_factor=-1", "above 0"]),
        ({"sent_in_fp8": 1}, ["sent_in_fp8=1", "True or False"]),
    ],
)
def test_bad_parallel_gets_a_clear_error(parallel, words):
    x, gates, chosen, w_in, w_out, _ = arrays()
    with (
        jax.set_mesh(mesh_of(AxisType.Auto, expert=2)),
        pytest.raises((TypeError, ValueError)) as raised,
    ):
        fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=RECIPES["blockwise"],
            parallel=fp8.moe.ExpertParallel(**parallel),
        )  # fmt: skip
    for word in words:
        assert word in str(raised.value)
