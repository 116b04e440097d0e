"""`jaxfp8.plugs.axlearn`: states as variables, in the real package if installed.

The first test repeats what it does: each array of a state is a variable that begins as zeros, and
is overwritten with its gradient.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import Message, check
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.plugs import axlearn, equinox, haliax
from jaxfp8.plugs._policy import Policy, import_guest
from jaxfp8.plugs._state_bytes import StateBytes, from_bytes, split
from jaxfp8.plugs.axlearn import leaf_shapes, state_from_variables

RECIPES = ("delayed", "current", "blockwise", "mxfp8")
# A plug hands its recipe on: one with state, and one whose tiles span tokens, show that it does.
FEW = [
    pytest.param(name, marks=() if name in ("delayed", "blockwise") else pytest.mark.slow)
    for name in RECIPES
]


def reference(name, equation, x):
    recipe = fp8.recipes.get(name)
    return jax.jit(
        fp8.value_and_grad(
            lambda w, s: jnp.mean(fp8.einsum(equation, x, w, recipe=recipe, state=s) ** 2)
        )
    )


def amax_history(recipe, parameters):
    return state_from_variables(recipe, parameters.__getitem__).amax_history


@pytest.mark.parametrize("cast", [None, "bfloat16"])
@pytest.mark.parametrize("name", FEW)
def test_trains_as_the_op_does(name, cast):
    """axlearn's `train_dtype` casts all parameters, states too."""
    recipe, x = fp8.recipes.get(name), jax.random.normal(jax.random.key(0), (2, 32, 128))
    w = jax.random.normal(jax.random.key(1), (128, 128))
    parameters = {n: jnp.zeros(shape, jnp.float32) for n, shape in leaf_shapes(recipe).items()}

    def loss_fn(parameters, x):
        states = {n: leaf.astype(cast) if cast else leaf for n, leaf in parameters.items()}
        y = fp8.einsum(
            "...y,yz->...z", x, parameters["w"], recipe=recipe,
            state=state_from_variables(recipe, states.__getitem__), state_channel="gradient",
        )  # fmt: skip
        return jnp.mean(y**2)

    step, expected = jax.jit(jax.value_and_grad(loss_fn)), reference(name, "...y,yz->...z", x)
    parameters, state = {**parameters, "w": w}, fp8.init_state(recipe)
    for _ in range(3):
        loss, new = step(parameters, x)
        same, grad, state = expected(w, state)
        assert_same_bits((loss, new["w"]), (same, grad))
        w = w - 0.1 * grad
        parameters = {**new, "w": parameters["w"] - 0.1 * new["w"]}
        if recipe.rows:
            assert_same_bits(amax_history(recipe, new), state.amax_history)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", RECIPES)
def test_in_axlearn_itself(name):
    layers = pytest.importorskip("axlearn.common.layers")
    dense = pytest.importorskip("axlearn.common.quantized_dot_general.layers")
    module = pytest.importorskip("axlearn.common.module")
    cfg = layers.Linear.default_config().set(name="l", input_dim=128, output_dim=64, bias=False)
    plug = axlearn.quantized_einsum_config(fp8.recipes.get(name))
    dense.set_quantized_dot_general_recursively(cfg, plug)
    layer, x = cfg.instantiate(parent=None), jax.random.normal(jax.random.key(1), (4, 32, 128))
    parameters = layer.initialize_parameters_recursively(jax.random.key(0))

    def loss_fn(parameters):
        y, _ = module.functional(
            layer, prng_key=jax.random.key(0), state=parameters, inputs=(x,), is_training=True
        )
        return jnp.mean(y**2)

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(parameters)
    state = fp8.init_state(fp8.recipes.get(name))
    same, grad, state = reference(name, "...d,dh->...h", x)(parameters["weight"], state)
    assert_same_bits((loss, grads["weight"]), (same, grad))
    if state:
        states = grads["quantized_dot_general"]
        assert_same_bits(amax_history(fp8.recipes.get(name), states), state.amax_history)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bytes_of_a_state_survive_a_cast(dtype):
    state = fp8.init_state(fp8.recipes.delayed())
    values = np.float32([0, 2.0**-149, 1e-36, 1 / 3, 3.4e38, np.inf, np.nan, 1 + 2.0**-23])
    history = np.resize(values, state.amax_history.shape)
    held = StateBytes(split(dataclasses.replace(state, amax_history=history)))
    found = from_bytes(jax.tree.map(lambda leaf: leaf.astype(dtype), held))
    assert_same_bits(found.amax_history, history)
    assert_same_bits(found.fingerprint, state.fingerprint)
    fresh = StateBytes(split(state))
    mean = jax.tree.map(lambda old, new: (0.9 * old + 0.1 * new).astype(dtype), fresh, held)
    assert not np.any(from_bytes(mean).fingerprint)  # unset


@pytest.fixture
def haliax_op(monkeypatch):
    """The operation of the plug, with a base class as haliax's, which need not be installed."""
    eqx = pytest.importorskip("equinox")
    classes = types.SimpleNamespace(OverwriteWithGradient=type("Base", (eqx.Module,), {}))
    packages = {"equinox": eqx, "haliax.quantization": classes}
    monkeypatch.setattr(
        "jaxfp8.plugs.haliax.import_guest", lambda module, package: packages[module]
    )
    haliax._operations.cache_clear()
    yield haliax.dot_general_op(fp8.recipes.delayed())
    haliax._operations.cache_clear()


def test_haliax_s_state_survives_levanter_s_cast(haliax_op):
    recipe, x = fp8.recipes.delayed(), jax.random.normal(jax.random.key(0), (32, 128), "bfloat16")
    w = jax.random.normal(jax.random.key(1), (128, 128))

    def loss_fn(params, state):
        w = params.astype(jnp.bfloat16)
        y = fp8.dot(x, w, recipe=recipe, state=state).astype(jnp.float32)
        return jnp.mean(y**2)

    def of_model(model):
        w, op = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)  # jmp's policy
        return jnp.mean(op(x, w, (((1,), (0,)), ((), ()))).astype(jnp.float32) ** 2)

    step, expected = jax.jit(jax.value_and_grad(of_model)), jax.jit(fp8.value_and_grad(loss_fn))
    state, op = fp8.init_state(recipe), haliax_op
    for _ in range(3):
        loss, (dw, op) = step((w, op))
        same, grad, state = expected(w, state)
        assert_same_bits((loss, dw), (same, grad))
        w = w - 0.1 * grad
        assert_same_bits(op.state.amax_history, state.amax_history)
        assert_same_bits(op.state.scale, state.scale)


def test_haliax_s_files_of_weights_have_no_state(haliax_op):
    used = jax.tree.map(jnp.ones_like, haliax_op)
    assert used.to_state_dict("mlp.dot_general") == {}
    assert not np.any(used.from_state_dict({}, "mlp.dot_general").state.scale)


ONES = np.ones((8, 8), np.float32)


def twice(op, x):
    return jnp.sum(op(op(x, x, (((1,), (0,)), ((), ()))), x, (((1,), (0,)), ((), ()))))


def test_axlearn_s_minibatches():
    state, none = (Policy.of("f", fp8.recipes.get(n), CHANNEL) for n in ("delayed", "current"))
    module = "axlearn.common.gradient_accumulation"
    with pytest.raises(fp8.FP8StateError, match=r"'delayed'.*forward_fn_transformation"):
        _called_by(module, axlearn.check_one_backward_pass, state)
    _called_by(module, axlearn.check_one_backward_pass, none)
    axlearn.check_one_backward_pass(state)


CHANNEL = {"state_channel": "gradient"}
HALIAX = {
    "microbatches": Message(
        fp8.FP8StateError, lambda op: _called_by("levanter.grad_accum", twice, op, ONES),
        "'delayed'", "microbatches", "per_device_parallelism to -1",
    ),
    "a second use": Message(
        fp8.FP8StateError, lambda op: jax.eval_shape(jax.grad(twice), op, jnp.ones((8, 8))),
        "used twice", "JAX would add", "fp8.fork",
    ),
}  # fmt: skip


def _called_by(module, function, *arguments):
    scope = {"__name__": module}
    exec("def microbatched(function, *args): return function(*args)", scope)
    return scope["microbatched"](function, *arguments)


@pytest.mark.parametrize("message", HALIAX.values(), ids=HALIAX)
def test_haliax_s_messages(message, haliax_op):
    check(message._replace(call=functools.partial(message.call, haliax_op)))


def test_a_missing_framework_names_its_package():
    with pytest.raises(ImportError, match="pip install nothing-here") as raised:
        import_guest("nothing_here.inner", "nothing-here")
    assert raised.value.name == "nothing_here.inner"


CALLS = {
    "axlearn": lambda: axlearn.quantized_einsum_config(fp8.recipes.current()),
    "haliax": lambda: haliax.dot_general_op(fp8.recipes.current()),
    "equinox": lambda: equinox.convert(None, fp8.recipes.current()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plug_without_its_framework(name, monkeypatch):
    monkeypatch.setattr(
        f"jaxfp8.plugs.{name}.import_guest", lambda module, package: import_guest("absent", name)
    )
    for cached in ("_layer", "_operations"):
        if function := getattr(__import__(f"jaxfp8.plugs.{name}", fromlist=[name]), cached, None):
            function.cache_clear()
    with pytest.raises(ImportError, match=f"pip install {name}"):
        CALLS[name]()


def test_bad_arguments():
    call = axlearn.quantized_einsum_config
    with pytest.raises(TypeError, match="recipe='current'"):
        call("current")
    with pytest.raises(TypeError, match="no option kernel=1"):
        call(fp8.recipes.current(), kernel=1)
