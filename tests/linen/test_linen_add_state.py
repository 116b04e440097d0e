"""Checkpoints that were saved before a linen model ran in FP8."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_models import RECIPE, Boxed, Named, Stack, Unnamed, fp8_dense
from flax import serialization
from flax.core import freeze
from linen_made import made
from messages import Message, check
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, TrainState, add_state

KEY = jax.random.key(0)
X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
UNNAMED = {r"Dense_(\d+)": r"FP8Dense_\1"}


def msgpack(variables, path):
    del path
    return serialization.msgpack_restore(serialization.to_bytes(variables))


def orbax(variables, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "saved", variables)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path / "saved")


FILES = {
    "as it is": lambda variables, path: variables,
    "FrozenDict": lambda variables, path: freeze(variables),
    "msgpack": msgpack,
    "orbax": orbax,
}
MODELS = {
    "Named": (Named, {}),
    "Unnamed": (Unnamed, UNNAMED),
    "Stack": (Stack, {}),
    "Boxed": (Boxed, {}),
}


ORBAX = {("by hand", "Stack"), ("by hand", "Boxed"), ("converted", "Unnamed")}


@functools.cache
def saved_before(cls):
    return jax.device_get(jax.jit(cls().init)(KEY, X))


@functools.cache
def in_fp8(kind, how):
    """The model, what is renamed for it, and its fresh variables."""
    cls, rename = MODELS[kind]
    if how == "by hand":
        model = cls(fp8_dense)
    else:
        model, rename = fp8.convert(cls(), RECIPE, inputs=(X,), keep=())[0], {}
    return model, rename, made(model, X, recipe=RECIPE)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize(
    ("how", "kind", "file"),
    [
        pytest.param(how, kind, file, marks=() if default else pytest.mark.slow)
        for how in ("by hand", "converted")
        for kind in MODELS
        for file in FILES
        # Orbax takes a tenth of a second, and does not know how the model was made.
        for default in [file != "orbax" or (how, kind) in ORBAX]
    ],
)
def test_a_checkpoint_in_fp8(kind, file, how, tmp_path):
    cls = MODELS[kind][0]
    old = saved_before(cls)
    model, rename, fresh = in_fp8(kind, how)
    new = add_state(FILES[file](old, tmp_path), model, X, rename=rename)
    assert jax.tree.structure(new) == jax.tree.structure(fresh)
    variables = dict(new)
    assert_same_bits(new.pop(COLLECTION), fresh[COLLECTION])
    assert_same_bits(jax.tree.leaves(new), jax.tree.leaves(old))  # names keep their order
    if file == "as it is":
        y, theirs = jax.jit(lambda a, b: (model.apply(a, X), cls().apply(b, X)))(variables, old)
        np.testing.assert_allclose(y, theirs, atol=0.2)


def test_a_train_state_and_a_step():
    model = Stack(fp8_dense)
    variables = add_state(saved_before(Stack), model, X)
    ts = TrainState.create(
        apply_fn=model.apply, params=variables["params"], fp8_state=variables[COLLECTION],
        tx=optax.sgd(0.1),
    )  # fmt: skip

    @jax.jit
    def step(ts, x):
        loss_fn = lambda params, state, x: jnp.mean(
            model.apply({"params": params, COLLECTION: state}, x) ** 2
        )
        loss, grads, state = fp8.value_and_grad(loss_fn)(ts.params, ts.fp8_state, x)
        return ts.apply_gradients(grads=grads, fp8_state=state), loss

    ts, first = step(ts, X)
    ts, second = step(ts, X)
    assert second < first
    (state,) = jax.tree.leaves(ts.fp8_state, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    assert state.amax_history.shape == (3, 3, 4)
    assert (state.scale > 0).all()


def test_states_fit_the_mesh_of_the_parameters():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.NamedSharding(mesh, jax.P())
    model, old = Stack(fp8_dense), jax.device_put(saved_before(Stack), everywhere)
    variables = add_state(old, model, X)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(variables[COLLECTION]))
    y = jax.jit(model.apply)(variables, jax.device_put(X, jax.NamedSharding(mesh, jax.P("data"))))
    alone = saved_before(Stack) | {COLLECTION: variables[COLLECTION]}
    np.testing.assert_allclose(y, jax.jit(model.apply)(alone, X), rtol=1e-6)


def test_arguments_are_types_and_flags():
    old = saved_before(Named)
    model = Named(fp8_dense)
    new = add_state(old, model, jax.ShapeDtypeStruct(X.shape, X.dtype), train=True)
    fresh = made(model, X, recipe=RECIPE)
    assert_same_bits(new, old | {COLLECTION: fresh[COLLECTION]})


def test_a_recipe_without_state():
    old = saved_before(Named)
    new = add_state(old, Named(lambda *a, **k: FP8Dense(*a, recipe=fp8.recipes.current(), **k)), X)
    assert set(new) == {"params", "batch_stats"}
    assert all(a is b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))


def test_bfloat16_is_widened_and_types_stay_types():
    old = jax.tree.map(lambda a: a.astype(jnp.bfloat16), saved_before(Unnamed))
    model = Unnamed(fp8_dense)
    new = add_state(old, model, X, rename=UNNAMED)
    kernel = new["params"]["FP8Dense_0"]["kernel"]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, old["params"]["Dense_0"]["kernel"].astype(jnp.float32))
    abstract = add_state(
        jax.eval_shape(lambda: jax.tree.map(jnp.asarray, old)), model, X, rename=UNNAMED
    )
    assert abstract["params"] == jax.eval_shape(lambda: jax.tree.map(jnp.asarray, new))["params"]
    assert isinstance(
        abstract[COLLECTION]["FP8Dense_0"]["FP8DotGeneral_0"]["fp8"].scale, np.ndarray
    )


def test_names_may_trade_places():
    """The second layer stays in bfloat16, so flax counts it from 0 again."""

    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(fp8_dense(16)(x))
            return nn.Dense(8)(x)

    old = saved_before(Unnamed)
    new = add_state(old, Half(), X, rename={"Dense_0": "FP8Dense_0", "Dense_1": "Dense_0"})
    assert new["params"]["Dense_0"]["kernel"] is old["params"]["Dense_1"]["kernel"]


def named():
    return jax.tree.map(np.asarray, saved_before(Named))


def named_in_fp8():
    return made(Named(fp8_dense), X, recipe=RECIPE)


def changed(path, value):
    """The variables of `Named`, with another array in one place. None takes it away."""
    variables = named()
    *parents, last = path.split("/")
    node = variables
    for name in parents:
        node = node.setdefault(name, {})
    if value is None:
        del node[last]
    else:
        node[last] = value
    return variables


def call(variables, rename=None, model=None):
    return lambda: add_state(
        variables() if callable(variables) else variables,
        Named(fp8_dense) if model is None else model, X, rename=rename or {},
    )  # fmt: skip


def unnamed(rename=None):
    return call(lambda: saved_before(Unnamed), rename, Unnamed(fp8_dense))


KERNEL = "params/up/kernel"
MESSAGES = {
    "names of classes": Message(
        ValueError, unnamed(),
        "params/FP8Dense_0/kernel: missing (the nearest name is params/Dense_0/kernel)",
        "must hold the arrays of the model", r'rename={r"Dense_(\d+)": r"FP8Dense_\1"}',
    ),
    "missing": Message(
        ValueError, call(lambda: changed(KERNEL, None)), f"{KERNEL}: missing",
        "must hold the arrays of the model", "Save or restore these too",
    ),
    "batch_stats": Message(
        ValueError, call(lambda: {"params": named()["params"]}),
        "batch_stats/BatchNorm_0/mean: missing", "must hold", "take them from a fresh model",
    ),
    "unexpected": Message(
        ValueError, call(lambda: changed("params/ups/kernel", np.ones(3))),
        "params/ups/kernel: unexpected (the nearest name is params/up/kernel)", "no others",
        "Leave these out",
    ),
    "shape": Message(
        ValueError, call(lambda: changed(KERNEL, np.ones((8, 4), np.float32))),
        f"{KERNEL}: its shape is [8, 4]", "the model's is [8, 16]", "sizes of the checkpoint",
    ),
    "dtype": Message(
        ValueError, call(lambda: changed(KERNEL, np.ones((8, 16), np.float64))),
        "its dtype is float64", "the model's is float32, which cannot hold it", ".astype",
    ),
    "no array": Message(
        ValueError, call(lambda: changed(KERNEL, "x")), "it is 'x'", "an array is needed", "",
    ),
    "None": Message(
        ValueError, call(lambda: named() | {"step": None}), "step: unexpected", "", "Leave these",
    ),
    "with state": Message(
        fp8.FP8StateError, call(lambda: named_in_fp8()), repr(COLLECTION),
        "a checkpoint without quantizer state", "fp8.check_state",
    ),
    "state elsewhere": Message(
        fp8.FP8StateError,
        call(lambda: {"params": {}, "fp8_state": named_in_fp8()[COLLECTION]}),
        "quantizer state at fp8_state/", "a checkpoint without it", "fp8.check_state",
    ),
    "params alone": Message(
        ValueError, call(lambda: named()["params"]), "['BatchNorm_0', 'down', 'up']",
        "no collection 'params'", "{'params': params}",
    ),
    "no dict": Message(
        TypeError, call(X), "variables is an object", "dict of collections", "{'params': params}"
    ),
    "no model": Message(
        TypeError, call(named, model="model"), "'model'", "unbound flax.linen.Module",
        "FP8Dense(16)",
    ),
    "a bound model": Message(
        TypeError, call(named, model=Named().bind({})), "a bound module", "unbound", "nnx.add_state"
    ),
    "a pattern without a match": Message(
        ValueError, unnamed({"Dens": "FP8Dense"}), "'Dens'",
        "must match a whole name", "'Dense_0'",
    ),
    "a pattern after another": Message(
        ValueError, unnamed({"Dense_.": "a", "Dense_0": "b"}), "makes one name 'a'", "its own",
        "Keep numbers",
    ),
    "a pattern that decides nothing": Message(
        ValueError, unnamed(UNNAMED | {"Dense_0": "b"}), "'Dense_0'", "an earlier pattern",
        "nearest names",
    ),
    "collections are not renamed": Message(
        ValueError, call(named, {"params": "weights"}), "'params' matches no name", "whole name",
        "nearest names",
    ),
    "two names become one": Message(
        ValueError, unnamed({r"Dense_\d+": "FP8Dense_0"}), "of 'Dense_0' and 'Dense_1' at params",
        "Each name needs one", "Keep numbers",
    ),
    "no regular expression": Message(
        ValueError, unnamed({"Dense_(": "x"}), "'Dense_('", "invalid regular expression",
        "Escape special characters",
    ),
    "no such group": Message(
        ValueError, unnamed({r"Dense_\d": r"FP8Dense_\1"}), r"FP8Dense_\\1", "is no replacement",
        r"\1, \2",
    ),
    "rename is no dict": Message(
        TypeError, unnamed([("a", "b")]), "[('a', 'b')]", "must be a dict", "rename={r",
    ),
    "rename by a function": Message(
        TypeError, unnamed({"a": len}), "len", "must be a dict", "rename={r",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    check(MESSAGES[name])


def test_a_long_list_is_cut():
    other = {"params": {f"layer_{n}": np.ones(1) for n in range(20)}}
    with pytest.raises(ValueError, match=r"in all") as raised:
        call(other)()
    assert len(str(raised.value).splitlines()) == 13  # ten faults
