"""`optim.check_state` takes what runs leave as it is, and finds edits that no run makes."""

import functools
import re

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from release_cases import SIGNS, stacked
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.optim import (
    FP8,
    BFloat16,
    BFloat16Plus,
    ExpandedFP8,
    Float16,
    Float32,
    Int8,
    adamw,
    check_state,
    release,
    scale_by_adam,
    scale_by_muon,
    with_master_weights,
    with_moment_formats,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
SMALL = {"min_size": 0}
LINEAR = Int8(group=64, companding=False, **SMALL)


def trace(format):
    return with_moment_formats(optax.trace(0.9), {"trace": format})


def adam(mu, nu):
    return scale_by_adam(mu=mu, nu=nu, b2=0.95)


def masters(master, **options):
    return with_master_weights(optax.sgd(0.01), master=master, **options)


ADAMS = {
    "float32": adam(Float32(), Float32()),
    "int8": adam(Int8(**SMALL), Int8(**SMALL)),
    "coat": adam(ExpandedFP8(**SMALL), ExpandedFP8(**SMALL)),
    "fp8-lm": adam(FP8(**SMALL), Float16()),
    "bfloat16": adam(BFloat16(), BFloat16()),
    "stochastic": adam(FP8(fp8.E5M2, "stochastic", **SMALL), BFloat16("stochastic")),
    "fp8": adam(FP8(**SMALL), FP8(**SMALL, force=True)),
}
FIRST = {
    "muon": scale_by_muon(mu=LINEAR),
    "trace": trace(LINEAR),
    "master float32": masters(Float32()),
    "master float16": masters(Float16()),
    "master fp8": masters(FP8(force=True)),
    "master 16": masters(BFloat16Plus()),
    "master 8": masters(BFloat16Plus(bits=8)),
}
TXS = ADAMS | FIRST


def params():
    """A matrix whose last axis is no multiple of a group, and float16, which needs a high part."""
    draw = np.random.default_rng(0).normal(size=(6, 300))
    return {"w": draw.astype(ml_dtypes.bfloat16), "h": draw[:4, :64].astype(np.float16)}


def starts():
    return {name: tx.init(params()) for name, tx in TXS.items()}


@functools.cache
def types():
    return jax.eval_shape(starts)


@jax.jit
def _trained(size, steps):
    """Gradients of this size: some of them 0, a whole row 0, and all 0 for 100 steps."""

    def gradients(i):
        key = jax.random.fold_in(jax.random.key(0), i)

        def one(x):
            normal, kept = jax.random.normal(key, x.shape), jax.random.bernoulli(key, 0.9, x.shape)
            rows = jnp.arange(x.shape[0])[:, None] > 0
            return size * jnp.where(kept & rows & ((i < 200) | (i >= 300)), normal, 0)

        return jax.tree.map(one, params())

    def step(i, carry):
        weights, states = carry
        grads = gradients(i)
        done = {n: tx.update(grads, states[n], weights[n]) for n, tx in TXS.items()}
        weights = {
            n: optax.apply_updates(weights[n], done[n][0]) if "master" in n else weights[n]
            for n in TXS
        }
        return weights, {n: state for n, (_, state) in done.items()}

    start = {n: jax.tree.map(jnp.asarray, params()) for n in TXS}, starts()
    return jax.lax.fori_loop(0, steps, step, start)[1]


@functools.cache
def trained(size=1.0, steps=3):
    return jax.device_get(_trained(jnp.float32(size), jnp.int32(steps)))


OTHER_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (1e-30, 1e-18, 1e15)]


@pytest.mark.parametrize("size", [1.0, 0.0, *OTHER_SIZES])
def test_what_runs_leave_is_taken_as_it_is(size):
    for steps in (0, 1, 3, 250, 500) if size == 1 else (3, 250):
        state = trained(size, steps)
        assert check_state(state, types()).keys() == state.keys()


def test_a_run_that_diverged_is_named():
    """The square of a gradient of 1e30 is inf. First moments and masters stay finite."""
    state = trained(1e30)
    for name in FIRST:
        check_state(state[name], types()[name])
    for name in ADAMS:
        with pytest.raises(ValueError, match=r"nu\['w'\].*diverged before"):
            check_state(state[name], types()[name])


leaves = jax.tree.leaves


def edited(state, place, change):
    """The state with another array. `change` gets a copy, or gives a new one."""

    def one(path, x):
        if jax.tree_util.keystr(path) != place:
            return x
        x = np.array(x)
        new = change(x)
        return x if new is None else new

    after = jax.tree_util.tree_map_with_path(one, state)
    arrays = lambda tree: [(x.dtype, x.shape, x.tobytes()) for x in map(np.asarray, leaves(tree))]
    assert arrays(after) != arrays(state), place
    return after


def put(value, at=0):
    """Writes a value into one place. The first rows of moments are 0, the last ones are not."""

    def change(x):
        x.reshape(-1)[at] = value

    return change


def bits(value, at=0):
    def change(x):
        x.view(f"u{x.dtype.itemsize}").reshape(-1)[at] = value

    return change


def remainders():
    return trained()["master 8"].masters.low["h"].reshape(-1)


def without_a_group(x, group):
    x[-1, :group] = 0


def halved(x):
    """As an average with zeros: no code is near the largest one any more."""
    x[...] = (x.astype(np.float32) / 2).astype(x.dtype)


POWERS = {"nan": np.nan, "too small": 0.12, "too large": 11_522.0, "negative": -1.0, "zero": 0.0}
SCALES = {"nan": np.nan, "inf": np.inf, "negative": -1.0, "subnormal": 1e-40}
EDITS = {
    **{
        f"{name} {place}: {kind}": (name, place, put(value, -1))
        for name, place in [
            ("int8", ".inner.mu['w'].largest"), ("int8", ".inner.nu['w'].largest"),
            ("coat", ".inner.nu['w'].largest"), ("muon", ".inner.mu['w'].largest"),
            ("fp8-lm", ".inner.mu['w'].scale"), ("fp8-lm", ".inner.nu['w'].scale"),
            ("stochastic", ".inner.mu['w'].scale"), ("master float16", ".masters.scale['w']"),
            ("master fp8", ".masters.scale['w']"),
        ]
        for kind, value in SCALES.items()
    },
    **{
        f"power {kind}": ("coat", ".inner.mu['w'].power", put(value, -1))
        for kind, value in POWERS.items()
    },
    "int8 -128": ("int8", ".inner.mu['w'].roots", put(-128, -1)),
    "linear -128": ("trace", ".inner.trace['w'].codes", put(-128, -1)),
    "code beside 0": ("int8", ".inner.mu['w'].roots", put(1)),
    "second code beside 0": ("int8", ".inner.nu['w'].roots", put(2)),
    "a root of 1": ("int8", ".inner.nu['w'].roots", put(1, -1)),
    "expanded code beside 0": ("coat", ".inner.nu['w'].values", put(1.0)),
    "0 beside codes": ("int8", ".inner.mu['w'].largest", put(0.0, -1)),
    "0 beside linear codes": ("muon", ".inner.mu['w'].largest", put(0.0, -1)),
    "a group lost": ("int8", ".inner.nu['w'].roots", lambda x: without_a_group(x, 128)),
    "an expanded group lost": ("coat", ".inner.mu['w'].values", lambda x: without_a_group(x, 128)),
    "a linear group lost": ("muon", ".inner.mu['w'].codes", lambda x: without_a_group(x, 64)),
    "a group divided": ("int8", ".inner.mu['w'].roots", halved),
    "an FP8 tensor divided": ("fp8-lm", ".inner.mu['w'].values", halved),
    "an FP8 tensor of zeros": ("fp8-lm", ".inner.mu['w'].values", lambda x: x.fill(0)),
    "a float16 tensor divided": ("fp8-lm", ".inner.nu['w'].values", halved),
    "a float16 tensor of zeros": ("fp8-lm", ".inner.nu['w'].values", lambda x: x.fill(0)),
    "a master divided": ("master float16", ".masters.values['w']", halved),
    "an FP8 master divided": ("master fp8", ".masters.values['w']", halved),
    "a scale of 3": ("fp8-lm", ".inner.nu['w'].scale", put(3.0)),
    "a scale of 2^126": ("fp8-lm", ".inner.nu['w'].scale", put(2.0**126)),
    "an FP8 scale of 2^126": ("fp8-lm", ".inner.mu['w'].scale", put(2.0**126)),
    "E4M3 NaN": ("fp8-lm", ".inner.mu['w'].values", bits(0x7F, -1)),
    "E4M3 -NaN": ("coat", ".inner.mu['w'].values", bits(0xFF, -1)),
    "E5M2 inf": ("stochastic", ".inner.mu['w'].values", bits(0x7C, -1)),
    "FP8 master NaN": ("master fp8", ".masters.values['w']", bits(0x7F)),
    "float16 NaN": ("fp8-lm", ".inner.nu['w'].values", put(np.nan)),
    "float16 master -inf": ("master float16", ".masters.values['h']", put(-np.inf)),
    "float32 master NaN": ("master float32", ".masters.values['w']", put(np.nan)),
    "high inf": ("master 16", ".masters.high['h']", put(np.nan)),
    "a remainder that gives NaN": (
        "master 8", ".masters.high['h']", lambda x: bits(0, int(np.argmax(remainders() >= 128)))(x)
    ),
    "float32 nu negative": ("float32", ".inner.nu['w']", put(-1e-6)),
    "bfloat16 nu negative": ("bfloat16", ".inner.nu['w']", put(-1e-6)),
    "float16 nu negative": ("fp8-lm", ".inner.nu['w'].values", put(-1.0, -1)),
    "expanded nu negative": ("coat", ".inner.nu['w'].values", put(-1.0, -1)),
    "FP8 nu negative": ("fp8", ".inner.nu['w'].values", put(-1.0, -1)),
    "float32 mu inf": ("float32", ".inner.mu['w']", put(np.inf)),
    "bfloat16 mu NaN": ("bfloat16", ".inner.mu['w']", put(np.nan)),
    "count": ("int8", ".inner.count", put(-1)),
    "step": ("int8", ".step", put(-1)),
    "shape": ("int8", ".inner.mu['w'].roots", lambda x: x[1:]),
    "groups": ("int8", ".inner.mu['w'].largest", lambda x: x[:, :2]),
    "dtype": ("float32", ".inner.mu['w']", lambda x: x.astype(np.float64)),
    "bytes of npz": ("bfloat16", ".inner.mu['w']", lambda x: x.view("V2")),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found(edit):
    name, place, change = EDITS[edit]
    state = edited(trained()[name], place, change)
    node = re.sub(r"\\\.(values|scale|largest|roots|codes|power|high)", ".*", re.escape(place))
    with pytest.raises(ValueError, match=rf"(?s)fault.* in the optimizer state:\n  {node}.*: "):
        check_state(state, types()[name])


def test_the_message_counts_and_lists_ten():
    state = trained()["int8"]
    bad = edited(state, ".inner.mu['w'].largest", lambda x: np.full_like(x, np.nan))
    with pytest.raises(
        ValueError, match=r"1 fault .*\n .*largest\[0, 0\] = nan: .*\(17 more values"
    ):
        check_state(bad, types()["int8"])
    both = [{str(i): bad for i in range(12)}, {str(i): types()["int8"] for i in range(12)}]
    with pytest.raises(
        ValueError, match=r"(?s)^12 faults(?:[^\n]*\n){11}\.\.\.\nRestore an earlie"
    ):
        check_state(*both)


OTHERS = {
    "companding": (trace(Int8(64, **SMALL)), trace(LINEAR)),
    "no companding": (trace(LINEAR), trace(Int8(64, **SMALL))),
    "float32": (trace(Float32()), trace(Int8(**SMALL))),
    "stored": (trace(Int8(**SMALL)), trace(Float32())),
    "float16": (trace(Float16()), trace(FP8(**SMALL))),
    "E5M2": (trace(FP8(fp8.E5M2, **SMALL)), trace(FP8(**SMALL))),
    "bfloat16": (trace(BFloat16()), trace(Float32())),
    "group": (trace(Int8(32, **SMALL)), trace(Int8(**SMALL))),
    "master": (masters(Float16()), masters(Float32())),
    "other master": (masters(Float32()), masters(Float16())),
    "remainder": (masters(BFloat16Plus()), masters(BFloat16Plus(bits=8))),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_format_is_refused(other):
    saved, tx = OTHERS[other]
    state, like = jax.jit(saved.init)(params()), jax.eval_shape(tx.init, params())
    for each in (state, flax.serialization.to_state_dict(state), as_orbax(state)):
        with pytest.raises(ValueError, match=r"in the optimizer state:\n  .*\['[hw]'\]"):
            check_state(each, like)


def as_orbax(tree):
    """As Orbax restores without a target: dicts for named tuples, lists for tuples."""
    if hasattr(tree, "_fields"):
        tree = tree._asdict()
    if isinstance(tree, dict):
        return {name: as_orbax(x) for name, x in tree.items()}
    return [as_orbax(x) for x in tree] if isinstance(tree, tuple | list) else tree


def test_another_companding_is_refused_by_update_and_old_names_are_too():
    for saved, tx in (OTHERS["companding"], OTHERS["no companding"]):
        state = jax.eval_shape(saved.init, params())
        with pytest.raises(ValueError, match="another format has stored"):
            jax.eval_shape(tx.update, params(), state)
    like = OTHERS["companding"][0].init(params())
    old = flax.serialization.to_state_dict(like)
    for name, moment in old["inner"]["trace"].items():  # versions before called both of them codes
        old["inner"]["trace"][name] = {"codes": moment["roots"], "largest": moment["largest"]}
    with pytest.raises(ValueError, match=r"holds .codes int8.* has Int8State .roots int8"):
        check_state(old, like)
    with pytest.raises(ValueError, match="codes"):
        flax.serialization.from_state_dict(like, old)


def test_files_without_a_target(tmp_path):
    some = ("int8", "coat", "fp8-lm", "master 16")  # each type of node
    state, like = ({name: tree[name] for name in some} for tree in (trained(), types()))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", state)
        checkpointer.wait_until_finished()
        of_orbax = checkpointer.restore(tmp_path / "run")
    of_flax = flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))
    for restored in (of_orbax, of_flax):
        checked = check_state(restored, like)
        assert jax.tree.structure(checked) == jax.tree.structure(like)
        assert_same_bits(checked, state)


def wrapped():
    tx = adamw(1e-2, mu=Int8(**SMALL), nu=Float16())
    kept = {"w": True, "h": False}
    inject = optax.inject_hyperparams(functools.partial(adamw, mu=FP8(**SMALL), nu=BFloat16()))
    return {
        "chain": optax.chain(optax.clip_by_global_norm(1.0), tx, optax.zero_nans()),
        "masked": optax.masked(tx, kept),
        "partition": optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "h": "b"}),
        "multi": optax.MultiSteps(tx, 2).gradient_transformation(),
        "inject": inject(learning_rate=optax.linear_schedule(1e-2, 0.0, 10)),
        "finite": with_master_weights(optax.apply_if_finite(tx, 5), master=BFloat16Plus(bits=8)),
        "plateau": optax.chain(tx, optax.contrib.reduce_on_plateau()),  # its best loss is inf
        "sm3": optax.sm3(0.1),  # its `nu` is a first moment
        "noise": optax.chain(tx, optax.add_noise(0.1, 0.5, 0)),
    }


def test_wrappers():
    start = {name: x.astype(np.float32) for name, x in params().items()}
    of = lambda name: params() if name == "finite" else start

    @jax.jit
    def states():
        txs = wrapped()
        first = {n: tx.init(of(n)) for n, tx in txs.items()}
        options = lambda n: {"value": 1.0} if n == "plateau" else {}
        grads = jax.tree.map(jnp.negative, start)
        return first, {
            n: tx.update(grads, first[n], of(n), **options(n))[1] for n, tx in txs.items()
        }

    like, state = jax.device_get(states())
    checked = check_state(flax.serialization.to_state_dict(state), like)
    keys = state.pop("noise")[1], checked.pop("noise")[1]
    assert keys[0].rng_key is keys[1].rng_key
    assert_same_bits(checked, state)
    bad = edited(state["multi"], ".inner_opt_state.inner[0].mu['w'].largest", put(-1.0))
    with pytest.raises(ValueError, match=r"inner_opt_state.inner\[0\].mu\['w'\].largest\[0, 0\]"):
        check_state(bad, like["multi"])
    bad = edited(state["multi"], ".mini_step", put(-1))
    with pytest.raises(ValueError, match="mini_step = -1: it counts"):
        check_state(bad, like["multi"])


def test_small_things():
    """Numbers and empty arrays have no codes. One array alone, and another tree."""
    start = {"n": np.float32(2), "none": np.zeros((0, 4), np.float32)}
    tx = trace(Int8(**SMALL))
    _, state = tx.update(start, tx.init(start))
    check_state(state, tx.init(start))
    tx = masters(Float16())  # its state has the fields of a moment
    alone = tx.init(params()["w"])
    check_state(alone, alone)
    with pytest.raises(ValueError, match=r"masters.values\[0, 0\] = nan"):
        check_state(edited(alone, ".masters.values", put(np.nan)), alone)
    state = jax.device_get(state)
    with pytest.raises(ValueError, match=r"trace\['n'\]: missing(?s:.*)\['m'\]: like has no such"):
        check_state(
            state._replace(inner=optax.TraceState({"m": 0.0, "none": start["none"]})), state
        )
    with pytest.raises(ValueError, match="cannot be read"):
        check_state(types()["int8"], types()["int8"])
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda state: check_state(state, state))(state)


def test_released_layers():
    stack = release(SIGNS)
    layers = jax.jit(stack.init)(stacked())
    like = jax.eval_shape(jax.vmap(SIGNS.init), stacked())
    assert_same_bits(check_state(layers.opt_state, like), layers.opt_state)
    place = ".inner.inner[0].mu['up'].largest"
    with pytest.raises(ValueError, match=r"mu\['up'\].largest\[2, 7, 1\] = -1"):
        check_state(edited(layers.opt_state, place, put(-1.0, -1)), like)
    with pytest.raises(ValueError, match=r"layers\.opt_state"):
        check_state(layers, layers)
    # A scale of FP8 and Float16 is one for each layer.
    tx = adam(FP8(**SMALL), Float16())
    grads = {"w": np.array([[[1.0, 2.0]], [[0.0, 0.0]], [[1e-8, -3e-8]]], np.float32)}
    like = jax.vmap(tx.init)(grads)
    _, state = jax.jit(jax.vmap(tx.update))(grads, like)
    check_state(state, like)
    with pytest.raises(ValueError, match=r"scale\[1\] = 2\.: it must be 1, as all values are 0"):
        check_state(edited(state, ".inner.mu['w'].scale", put(2.0, 1)), like)


def test_on_a_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx, weights = TXS["int8"], {"w": np.ones((16, 256), np.float32)}
    put_on = lambda x: jax.device_put(x, NamedSharding(mesh, P("data") if np.ndim(x) == 2 else P()))
    like = tx.init(weights)
    _, state = jax.jit(tx.update)(jax.tree.map(put_on, weights), jax.tree.map(put_on, like))
    checked = check_state(state, like)
    assert checked.inner.mu["w"].roots is state.inner.mu["w"].roots  # where it was
    bad = jax.tree.map(put_on, edited(state, ".inner.nu['w'].largest", put(np.nan, -1)))
    with pytest.raises(ValueError, match=r"nu\['w'\].largest\[15, 1\]"):
        check_state(bad, like)


def test_nnx_optimizer():
    """It turns stored moments into states of nnx, inside of its Variables."""
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adamw(1e-2), wrt=nnx.Param)
    like = jax.tree.map(lambda x: x, optimizer.opt_state)
    gradient = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 64)))))
    nnx.jit(lambda optimizer, model: optimizer.update(model, gradient(model)))(optimizer, model)
    for each in (like, optimizer.opt_state):
        check_state(optimizer.opt_state, each)
        change = lambda path, x: x.at[0, 0].set(-1) if "largest" in str(path) else x
        bad = jax.tree_util.tree_map_with_path(change, optimizer.opt_state)
        with pytest.raises(ValueError, match="2 faults"):
            check_state(bad, each)
