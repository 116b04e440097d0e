"""Checkpoints that were saved before an nnx model ran in FP8."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from messages import Message, check
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.nnx import FP8Linear, add_state
from jaxfp8.state._state import LEAVES

RECIPE = fp8.recipes.delayed(history_length=4)
X = jax.random.normal(jax.random.key(1), (4, 8))


def fp8_linear(*args, **kwargs):
    return FP8Linear(*args, recipe=RECIPE, **kwargs)


class Net(nnx.Module):
    def __init__(self, seed, linear=nnx.Linear):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.table = nnx.data(jnp.full(8, float(seed)))  # an array that is no Variable

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.dropout(self.norm(x)) + self.table[None]


class Stack(nnx.Module):
    def __init__(self, seed, linear=nnx.Linear):
        make = nnx.vmap(lambda rngs: linear(8, 8, rngs=rngs), in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(make)(nnx.Rngs(seed))

    def __call__(self, x):
        return nnx.scan(lambda x, f: f(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


def weights(model):
    """All but keys of random numbers, which msgpack cannot save."""
    return nnx.state(model, nnx.Not(nnx.RngState))


def orbax(tree, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "saved", tree)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path / "saved")


def msgpack(model, path):
    del path
    return serialization.msgpack_restore(
        serialization.to_bytes(with_text_keys(nnx.to_pure_dict(weights(model))))
    )


def with_text_keys(tree):
    """flax's msgpack takes no integers as keys."""
    if not isinstance(tree, dict):
        return tree
    return {str(name): with_text_keys(inner) for name, inner in tree.items()}


FILES = {
    "state": lambda model, path: nnx.state(model),
    "pure dict": lambda model, path: nnx.to_pure_dict(nnx.state(model)),
    "msgpack": msgpack,
    "orbax of a state": lambda model, path: orbax(nnx.state(model), path),
    "orbax of a dict": lambda model, path: orbax(nnx.to_pure_dict(nnx.state(model)), path),
}


# Each model in each way to make it, and each kind of file: orbax takes a tenth of a second.
FEW = {
    (Net, "by hand", "orbax of a state"), (Net, "by hand", "msgpack"),
    (Net, "converted", "pure dict"), (Net, "abstract", "state"), (Stack, "by hand", "state"),
    (Stack, "converted", "msgpack"), (Stack, "abstract", "orbax of a dict"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize(
    ("make", "how", "file"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for case in itertools.product((Net, Stack), ("by hand", "converted", "abstract"), FILES)
    ],
)
def test_a_checkpoint_in_fp8(make, how, file, tmp_path):
    old = make(3)
    if how == "converted":
        model = fp8.convert(make(4), RECIPE, keep=())[0]
    elif how == "abstract":
        if file == "msgpack" and make is Net:
            pytest.skip("its keys of random numbers are not in the file")
        model = nnx.eval_shape(lambda: make(4, fp8_linear))
    else:
        model = make(4, fp8_linear)
    add_state(model, FILES[file](old, tmp_path))
    want = make(3, fp8_linear)
    assert_same_bits(weights(model), weights(want))
    assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(nnx.state(model, nnx.Param)))
    model.eval(), want.eval()
    np.testing.assert_array_equal(model(X), want(X))


@pytest.mark.parametrize("make", [Net, Stack])
def test_a_step(make):
    model, want = nnx.eval_shape(lambda: make(4, fp8_linear)), make(3, fp8_linear)
    add_state(model, nnx.state(make(3)))
    step = nnx.jit(fp8.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2)))
    for _ in range(2):
        assert_same_bits(step(model, X), step(want, X))


def test_keys_of_random_numbers_are_optional():
    old, model = Net(3), Net(4, fp8_linear)
    key = model.dropout.rngs.key.get_raw_value()
    add_state(model, nnx.state(old, (nnx.Param, nnx.BatchStat)) | {"table": old.table})
    assert model.dropout.rngs.key.get_raw_value() is key
    add_state(model, nnx.state(old))
    assert model.dropout.rngs.key.get_raw_value() == old.dropout.rngs.key.get_raw_value()


def test_a_model_that_was_trained_gets_fresh_states():
    model, new = fp8_linear(8, 8, rngs=nnx.Rngs(0)), fp8_linear(8, 8, rngs=nnx.Rngs(1))
    fp8.nnx.value_and_grad(lambda model, x: model(x).sum())(model, X)
    fp8.nnx.settle(model)
    add_state(model, nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(1))))
    assert_same_bits(nnx.state(model), nnx.state(new))
    assert not model.dot_general.state.get_value().settled


def test_arrays_stay_on_the_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("data"))
    model, old = fp8_linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))
    nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), split))
    add_state(model, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(old))))
    assert model.kernel.get_raw_value().sharding == split
    y = nnx.jit(lambda model, x: model(x))(model, jax.device_put(X, split))
    np.testing.assert_allclose(y, fp8_linear(8, 8, rngs=nnx.Rngs(1))(X), rtol=1e-6)


def test_bfloat16_is_widened_and_names_change():
    class New(nnx.Module):
        def __init__(self):
            self.first = fp8_linear(8, 8, rngs=nnx.Rngs(0))
            self.second = fp8_linear(8, 8, rngs=nnx.Rngs(0))

    model, old = New(), Net(3)
    saved = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(old, nnx.Param)["layers"])
    add_state(model, saved, rename={"0": "first", "1": "second"})
    assert model.first.kernel.get_raw_value().dtype == jnp.float32
    assert_same_bits(model.second.kernel[...], saved[1]["kernel"][...].astype(jnp.float32))


def test_a_recipe_without_state():
    model, old = FP8Linear(8, 8, recipe=fp8.recipes.current(), rngs=nnx.Rngs(0)), linear()
    add_state(model, nnx.state(old))
    assert_same_bits(nnx.state(model), nnx.state(old))


def linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(1))


def call(saved, rename=None, model=None):
    def run():
        add_state(
            fp8_linear(8, 8, rngs=nnx.Rngs(0)) if model is None else model(),
            saved(), rename=rename or {},
        )  # fmt: skip

    return run


def pure(**arrays):
    return lambda: nnx.to_pure_dict(nnx.state(linear())) | arrays


MESSAGES = {
    "missing": Message(
        ValueError, call(lambda: {"bias": X[0]}), "kernel: missing", "saved must hold the arrays",
        "Save or restore these too",
    ),
    "keys of an abstract model": Message(
        ValueError,
        call(lambda: weights(Net(3)), model=lambda: nnx.eval_shape(lambda: Net(4, fp8_linear))),
        "dropout/rngs/key: missing", "must hold", "take them from a fresh model",
    ),
    "unexpected": Message(
        ValueError, call(pure(kernels=X)),
        "kernels: unexpected (the nearest name is kernel)", "no others", "Leave these out",
    ),
    "names": Message(
        ValueError, call(lambda: {"bias": X[0], "weight": X}), "weight: unexpected", "no others",
        "write rename=",
    ),
    "shape": Message(
        ValueError, call(pure(kernel=X)), "its shape is [4, 8]", "the model's is [8, 8]", "sizes",
    ),
    "dtype": Message(
        ValueError, call(pure(bias=np.ones(8))), "its dtype is float64", "float32", ".astype",
    ),
    "with state": Message(
        fp8.FP8StateError, call(lambda: nnx.state(fp8_linear(8, 8, rngs=nnx.Rngs(0)))),
        "quantizer state at dot_general/state", "without it is needed", "fp8.check_state",
    ),
    "with restored state": Message(
        fp8.FP8StateError,
        call(pure(dot_general={"state": dict.fromkeys(LEAVES, 0)})),
        "quantizer state at dot_general/state", "without it is needed", "fp8.check_state",
    ),
    "a model": Message(
        TypeError, call(linear), "saved is an object of type Linear", "an nnx.State or a dict",
        "nnx.state(old_model)",
    ),
    "no model": Message(
        TypeError, call(pure(), model=lambda: "model"), "'model'", "flax.nnx.Module is needed",
        "fp8.linen.add_state",
    ),
    "a pattern without a match": Message(
        ValueError, call(pure(), {"kernell": "a"}), "'kernell' matches no name", "a whole name",
        "['kernel'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    check(MESSAGES[name])


def test_an_error_changes_nothing():
    model = fp8_linear(8, 8, rngs=nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    with pytest.raises(ValueError, match="shape"):
        add_state(model, nnx.state(linear()) | {"kernel": X})
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))
