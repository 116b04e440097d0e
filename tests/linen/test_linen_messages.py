"""Mistakes with linen layers, plugs and train states: the three parts of their messages."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import messages
import optax
import pytest
from flax.training.train_state import TrainState as FlaxTrainState
from linen_made import made
from messages import Message

import jaxfp8 as fp8
from jaxfp8 import linen
from jaxfp8.linen import (
    COLLECTION,
    FP8Dense,
    FP8DenseGeneral,
    FP8DotGeneral,
    FP8Einsum,
    FP8EinsumOp,
    TrainState,
)

DELAYED = fp8.recipes.delayed()
X, KEY = jnp.ones((2, 8)), jax.random.key(0)
DENSE = FP8Dense(8, recipe=DELAYED)
VARIABLES = made(DENSE, X)
LAYERS = {
    "FP8Dense": lambda: FP8Dense(4),
    "FP8DenseGeneral": lambda: FP8DenseGeneral(4),
    "FP8Einsum": lambda: FP8Einsum((8, 4), "bd,dk->bk"),
}
INPUTS = {
    "None": (None, "is None", "pass an array"),
    "dict": ({"x": X}, "is of type dict", "['x']"),
    "ShapeDtypeStruct": (
        jax.ShapeDtypeStruct((2, 8), jnp.float32),
        "is ShapeDtypeStruct",
        "jax.eval_shape",
    ),
    "Partitioned": (
        nn.Partitioned(X, ("a", "b")),
        "is of type Partitioned",
        "flax.linen.meta.unbox",
    ),
}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return DENSE.copy(name="up")(x), None


def scanned(**lifted):
    return nn.scan(Block, split_rngs={"params": True}, length=3, **lifted)()


def init(layer):
    return layer.init(KEY, X)


def created(**fields):
    given = {
        "apply_fn": DENSE.apply,
        "params": VARIABLES["params"],
        "fp8_state": VARIABLES[COLLECTION],
    }
    return TrainState.create(tx=optax.sgd(0.1), **(given | fields))


MESSAGES = {
    "using a name": Message(
        TypeError,
        lambda: FP8DotGeneral.using("delayed"),
        "recipe='delayed'",
        "a Recipe is needed",
        "fp8.recipes.delayed()",
    ),
    "plug with a name": Message(
        TypeError,
        lambda: FP8DotGeneral("mxfp8"),
        "recipe='mxfp8'",
        "a Recipe is needed",
        "fp8.recipes.mxfp8()",
    ),
    "op with a function": Message(
        TypeError,
        lambda: FP8EinsumOp(fp8.recipes.current),
        "recipe=<function",
        "a Recipe",
        "fp8.recipes.current()",
    ),
    "layer with a name": Message(
        TypeError,
        lambda: init(FP8Dense(4, recipe="current")),
        "recipe='current'",
        "a Recipe",
        "fp8.recipes.current()",
    ),
    "dot_general=class": Message(
        TypeError,
        lambda: init(nn.Dense(4, dot_general=FP8DotGeneral)),
        "given the class FP8DotGeneral",
        "an instance is needed",
        "dot_general_cls=FP8DotGeneral.using(recipe)",
    ),
    "dot_general=using": Message(
        TypeError,
        lambda: init(nn.Dense(4, dot_general=FP8DotGeneral.using(DELAYED))),
        "dot_general=FP8DotGeneral.using(...)",
        "needs a function like lax.dot_general",
        "dot_general_cls=FP8DotGeneral.using(recipe)",
    ),
    "dot_general_cls=instance": Message(
        TypeError,
        lambda: init(nn.Dense(4, dot_general_cls=FP8DotGeneral(DELAYED))),
        "an instance of FP8DotGeneral was called without operands",
        "needs a class",
        "dot_general_cls=FP8DotGeneral.using(recipe)",
    ),
    "class of ops": Message(
        TypeError,
        lambda: FP8EinsumOp("bd,dk->bk", X, X),
        "the class FP8EinsumOp",
        "an instance",
        "FP8EinsumOp(recipe)",
    ),
    "state_specs of variables": Message(
        fp8.FP8StateError,
        lambda: linen.state_specs(VARIABLES, {"kernel": jax.P()}),
        "holds the collections ['_overwrite_with_gradient', 'params']",
        "only the states are needed",
        "variables['_overwrite_with_gradient']",
    ),
    "state_specs of an array": Message(
        fp8.FP8StateError,
        lambda: linen.state_specs(X, {"kernel": jax.P()}),
        "of shape [2, 8] at the top of the tree",
        "expected quantizer state",
        "fp8.init_state",
    ),
    "state_specs for an array": Message(
        ValueError,
        lambda: linen.state_specs(VARIABLES[COLLECTION], X),
        "param_specs is an object of type ArrayImpl of shape [2, 8]",
        "a jax.P for each parameter",
        "flax.linen.get_partition_spec",
    ),
    "TrainState of variables": Message(
        fp8.FP8StateError,
        lambda: created(params=VARIABLES),
        "params holds the collections ['_overwrite_with_gradient', 'params']",
        "only the parameters are needed",
        "params=variables['params']",
    ),
    "TrainState, variables as state": Message(
        fp8.FP8StateError,
        lambda: created(fp8_state=VARIABLES),
        "fp8_state holds the collections ['_overwrite_with_gradient', 'params']",
        "only the quantizer states are needed",
        "fp8_state=variables['_overwrite_with_gradient']",
    ),
    "TrainState, parameters as state": Message(
        fp8.FP8StateError,
        lambda: created(fp8_state=VARIABLES["params"]),
        "of shape [8] at ['bias']",
        "expected quantizer state",
        "variables[COLLECTION]",
    ),
    "TrainState, a state that is lost": Message(
        fp8.FP8StateError,
        lambda: created().apply_gradients(grads=VARIABLES["params"], fp8_state={}),
        "fp8_state has 0 arrays",
        "another tree than the 4 of this TrainState",
        "the state that fp8.value_and_grad returned",
    ),
    "TrainState, a state of another recipe": Message(
        fp8.FP8StateError,
        lambda: created().apply_gradients(
            grads=VARIABLES["params"],
            fp8_state=FP8Dense(8, recipe=fp8.recipes.delayed(margin=1)).init(KEY, X)[COLLECTION],
        ),
        "fp8_state has 4 arrays",
        "another tree",
        "ts.replace",
    ),
    "TrainState, no state": Message(
        fp8.FP8StateError,
        lambda: created(fp8_state=None),
        "fp8_state is None",
        "a dict is needed",
        "variables.get('_overwrite_with_gradient', {})",
    ),
    "TrainState, what was seen": Message(
        fp8.FP8StateError,
        lambda: created().apply_gradients(
            grads=VARIABLES["params"], fp8_state=fp8.nothing_seen(VARIABLES[COLLECTION])
        ),
        "found SeenAmax (the amaxes that a step saw) at ['FP8DotGeneral_0']['fp8']",
        "expected quantizer state",
        "fp8.commit(state, seen)",
    ),
    "op outside of a module": Message(
        fp8.FP8StateError,
        lambda: FP8EinsumOp(DELAYED)("bd,dk->bk", X, X),
        "used outside of a module",
        "it has no state",
        "fp8.einsum(equation, lhs, rhs, recipe=recipe, state=state)",
    ),
    "op in the place of a dot_general": Message(
        TypeError,
        lambda: init(nn.Dense(4, dot_general_cls=FP8EinsumOp)),
        "the first argument of FP8EinsumOp is an array",
        "an equation is needed",
        "dot_general=FP8DotGeneral(recipe)",
    ),
    "state_specs of a matmul without a kernel": Message(
        ValueError,
        lambda: linen.state_specs(VARIABLES[COLLECTION], {"w": jax.P()}),
        "param_specs is a dict with the keys ['w']",
        "no kernel for the state",
        "use fp8.state_specs",
    ),
    "TrainState, joined gradients": Message(
        fp8.FP8StateError,
        lambda: created().apply_gradients(grads=VARIABLES, fp8_state=VARIABLES[COLLECTION]),
        "grads holds the collections ['_overwrite_with_gradient', 'params']",
        "only the parameters are needed",
        "the state that fp8.value_and_grad returned",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_three_parts(name):
    messages.check(MESSAGES[name])


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_an_input_that_is_no_array_is_named(layer, given):
    value, what, cure = INPUTS[given]
    call = lambda: LAYERS[layer]().init(KEY, value)
    messages.check(Message(TypeError, call, f"inputs {what}", "one array is needed", cure))


def test_a_scan_may_carry_a_state_that_every_call_returns():
    shared = scanned(variable_axes={"params": 0}, variable_broadcast=COLLECTION)
    variables = jax.eval_shape(shared.init, KEY, X, None)
    carrying = scanned(variable_axes={"params": 0}, variable_carry=COLLECTION)
    apply = functools.partial(carrying.apply, mutable=[COLLECTION])
    _, changed = jax.eval_shape(lambda variables: apply(variables, X, None), variables)
    assert jax.tree.structure(changed[COLLECTION]) == jax.tree.structure(variables[COLLECTION])


def test_broadcast_comes_before_carry():
    model = nn.scan(
        Block,
        variable_broadcast=("params", COLLECTION),
        variable_carry=True,
        split_rngs={"params": False},
        length=3,
    )()
    variables = made(model, X, None, recipe=DELAYED)
    loss_fn = lambda params, state: jnp.sum(
        model.apply({"params": params, COLLECTION: state}, X, None)[0]
    )
    step = jax.jit(fp8.value_and_grad(loss_fn))
    _, _, state = step(variables["params"], variables[COLLECTION])
    assert all(
        leaf.scale.all()
        for leaf in jax.tree.leaves(state, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    )


def test_a_forgotten_state_is_an_error():
    for call in (
        lambda: TrainState.create(
            apply_fn=DENSE.apply, params=VARIABLES["params"], tx=optax.sgd(0.1)
        ),
        lambda: created().apply_gradients(grads=VARIABLES["params"]),
    ):
        with pytest.raises(TypeError, match="fp8_state"):
            call()


@pytest.mark.parametrize(
    "lifted", [{"variable_axes": {"params": 0, COLLECTION: 0}}, {"variable_broadcast": COLLECTION}]
)
def test_the_cures_for_a_carried_collection(lifted):
    model = scanned(**({"variable_axes": {"params": 0}} | lifted))
    variables = made(model, X, None, recipe=DELAYED)
    state = variables[COLLECTION]
    loss_fn = lambda params, state: jnp.sum(
        model.apply({"params": params, COLLECTION: state}, X, None)[0]
    )
    loss, _, new = jax.jit(fp8.value_and_grad(loss_fn))(variables["params"], state)
    assert jnp.isfinite(loss)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)


def test_stock_train_state_takes_a_recipe_without_state():
    """The form that stock flax needs: the collection is there, empty if need be."""
    model = FP8Dense(4, recipe=fp8.recipes.current())
    variables = {COLLECTION: {}} | model.init(KEY, X)
    ts = FlaxTrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))
    loss_fn = lambda params, state: jnp.sum(model.apply({"params": params, COLLECTION: state}, X))
    _, grads, state = fp8.value_and_grad(loss_fn)(ts.params["params"], ts.params[COLLECTION])
    ts = ts.apply_gradients(grads={"params": grads, COLLECTION: state})
    assert int(ts.step) == 1
    assert ts.params[COLLECTION] == {}
