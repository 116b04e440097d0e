"""Which optimizers gradient release accepts: those whose traced program couples no parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from release_cases import TXS, body, inputs, plain_step, released_step, stacked

from jaxfp8.optim import BFloat16Plus, release, scale_by_muon, with_master_weights

pytestmark = pytest.mark.usefixtures("standard_promotion")
CLIP = optax.clip_by_global_norm(1.0)


def _counted(labels_of_state, update):
    """A transformation without parameters of its own, of gradients and the state before."""
    return optax.GradientTransformation(
        lambda params: dict.fromkeys(labels_of_state, jnp.zeros(())), update
    )


def _two_steps_late(grads, state, params):
    """The gradient of `up` reaches the update of `b` two steps later, and never its own state."""
    new = {"one": jnp.sum(grads["up"]).astype(jnp.float32), "two": state["one"]}
    return {**grads, "b": grads["b"] + state["two"]}, new


def _norm_in_the_state(grads, state, params):
    return grads, {"norm": optax.tree.norm(grads)}


def _by_a_loop(grads, state, params):
    """Each array is doubled as often as `b` says."""
    many = lambda c: c[0] < jnp.sum(grads["b"])
    return jax.lax.while_loop(
        many, lambda c: (c[0] + 1, jax.tree.map(lambda x: x * 2, c[1])), (0, grads)
    )[1], state


COUPLED = {
    "clip, sgd": optax.chain(CLIP, optax.sgd(0.1)),
    "clip, adam": optax.chain(CLIP, optax.adam(1e-3)),
    "clip, lion": optax.chain(CLIP, optax.lion(1e-3)),
    "clip, warm-up": optax.chain(CLIP, optax.sgd(optax.linear_schedule(0.0, 1e-3, 1000))),
    "clip in master weights": with_master_weights(
        optax.chain(CLIP, optax.adamw(1e-3)), master=BFloat16Plus(bits=8)
    ),
    "clip updates": optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1e-6)),
    "normalize": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "a part": optax.masked(CLIP, {"up": True, "b": True, "down": False}),
    # The size of gradients does not show these: what is clipped has a size of its own.
    "adam, clip": optax.chain(optax.scale_by_adam(), CLIP),
    "lion, clip": optax.chain(optax.scale_by_lion(), CLIP),
    "sign, clip": optax.chain(optax.scale_by_sign(), CLIP),
    "block rms, clip": optax.chain(optax.clip_by_block_rms(1.0), CLIP),
    "sm3, clip": optax.chain(optax.scale_by_sm3(), CLIP),
    "int8, clip": optax.chain(TXS["int8"], CLIP),
    "normalize alone": optax.normalize_by_update_norm(),
    "microbatches, clip": optax.MultiSteps(optax.chain(CLIP, optax.sgd(0.1)), 8),
    "skips large updates": optax.MultiSteps(
        optax.sgd(0.1),
        8,
        should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=1.0),
    ),
    "two steps late": _counted(("one", "two"), _two_steps_late),
    "a norm in the state": _counted(("norm",), _norm_in_the_state),
    "a loop": _counted((), _by_a_loop),
    "prodigy": optax.contrib.prodigy(),
    "dadapt": optax.contrib.dadapt_adamw(),
    "dog": optax.contrib.dog(),
    "dowg": optax.contrib.dowg(),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.contrib.normalize()),
    "lbfgs": optax.scale_by_lbfgs(),
    # One array in the state has the moments of all parameters.
    "flatten": optax.flatten(optax.adam(1e-3)),
}
UNCOUPLED = {
    **TXS,
    "lamb": optax.lamb(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "each parameter": optax.chain(optax.clip_by_block_rms(1.0), optax.adam(1e-3)),
    "each value": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "if finite": optax.apply_if_finite(optax.adam(1e-3), 5),
    "a frozen part": optax.partition(
        {"train": optax.adam(1e-3), "not": optax.set_to_zero()},
        {"up": "train", "b": "not", "down": "train"},
    ),
    "microbatches": optax.MultiSteps(optax.sgd(0.1), 8),
    "finite microbatches": optax.MultiSteps(
        optax.sgd(0.1), 8, should_skip_update_fn=optax.skip_not_finite
    ),
    "a schedule": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.0, 1.0, 9)),
    "each norm": optax.chain(optax.adaptive_grad_clip(0.1), optax.zero_nans(), optax.centralize()),
    "masters if finite": with_master_weights(
        optax.apply_if_finite(optax.adamw(1e-3), 5), master=BFloat16Plus()
    ),
    **{
        name: getattr(optax, name)(1e-3)
        for name in (
            "adabelief", "adadelta", "adagrad", "adamax", "adan", "amsgrad", "fromage", "lars",
            "nadamw", "novograd", "radam", "rmsprop", "rprop", "signum", "sm3", "yogi",
        )
    },
    **{
        name: getattr(optax.contrib, name)(1e-3)
        for name in ("acprop", "ademamix", "adopt", "madgrad", "muon", "schedule_free_adamw")
    },
    "cocob": optax.contrib.cocob(),
}  # fmt: skip


def types_of_released(tx, params, **how):
    """Of `release(tx).init(params)`, which computes nothing."""
    return jax.eval_shape(release(tx, **how).init, params)


@pytest.mark.parametrize("name", COUPLED)
def test_an_optimizer_that_couples_parameters(name):
    with pytest.raises(ValueError, match=r"couples parameters.*per_layer=True"):
        types_of_released(COUPLED[name], stacked())
    types_of_released(COUPLED[name], stacked(), per_layer=True)


@pytest.mark.parametrize("name", UNCOUPLED)
def test_an_optimizer_that_does_not(name):
    types_of_released(UNCOUPLED[name], stacked())


def test_the_error_names_parameters():
    with pytest.raises(ValueError, match=r"update of \['b'\] depends .* of \['down'\], \['up'\]\."):
        types_of_released(CLIP, stacked())
    many = {f"w{i}": np.ones((3, 4), np.float32) for i in range(9)}
    with pytest.raises(ValueError, match=r"\['w0'\] depends .* \['w3'\] and 5 more\."):
        types_of_released(CLIP, many)
    with pytest.raises(ValueError, match=r"state\['norm'\].* of \['b'\], \['down'\], \['up'\]\."):
        types_of_released(COUPLED["a norm in the state"], stacked())


def test_one_parameter_is_coupled_with_those_of_other_layers():
    with pytest.raises(ValueError, match=r"update of \['w'\] .* of \['w'\] of another layer"):
        types_of_released(optax.chain(CLIP, optax.sgd(0.1)), {"w": np.ones((3, 4), np.float32)})


def test_one_parameter_with_a_name():
    params = {"w": np.ones((3, 4, 4), np.float32)}
    for tx in (
        optax.adamw(1e-2, mask={"w": True}),
        optax.masked(optax.sgd(1e-2), {"w": True}),
    ):
        types_of_released(tx, params)
    with pytest.raises(ValueError, match="couples parameters"):
        types_of_released(optax.clip_by_global_norm(1.0), params)


def test_muon():
    """It loops over the power series of each matrix."""
    matrices = {"w": np.ones((3, 4, 4), np.float32), "v": np.ones((3, 4, 8), np.float32)}
    types_of_released(scale_by_muon(), matrices)
    for tx in (optax.chain(CLIP, scale_by_muon()), optax.chain(scale_by_muon(), CLIP)):
        with pytest.raises(ValueError, match="couples parameters"):
            types_of_released(tx, matrices)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["op by op", "compiled"])
def test_where_init_is_called_does_not_matter(how):
    """Under jit the optimizer may also read arrays of the program, such as a step size."""

    def init(step_size, *first):
        return release(optax.chain(*first, optax.sgd(step_size))).init(stacked())

    how(init)(0.1)
    with pytest.raises(ValueError, match="couples parameters"):
        how(lambda step_size: init(step_size, CLIP))(0.1)


def test_an_optimizer_that_needs_the_loss():
    for tx in (optax.contrib.momo(), optax.polyak_sgd(), optax.lbfgs(1e-3)):
        with pytest.raises(TypeError, match=r"(?s)'value'.*release traced .* no other arguments"):
            types_of_released(tx, stacked())


def test_an_optimizer_whose_state_changes_its_structure():
    tx = _counted(("one",), lambda grads, state, params: (grads, {}))
    with pytest.raises(ValueError, match=r"returns another state than tx\.init"):
        types_of_released(tx, stacked())


def test_microbatches_inside_of_the_optimizer():
    """`MultiSteps` adds up gradients of each layer, and updates in every second step."""
    tx = optax.MultiSteps(optax.sgd(0.5), 2).gradient_transformation()
    stack = release(tx)
    layers = jax.jit(stack.init)(stacked())
    plain = (stacked(), jax.vmap(tx.init)(stacked()))
    for i in range(2):
        layers, _, _ = released_step(stack, body, layers, inputs(i))
        plain, _, _ = plain_step(tx, body, plain, inputs(i))
        layers.check()
        changed = bool(jnp.any(layers.params["b"] != 0))
        assert changed == (i == 1)
        np.testing.assert_allclose(layers.params["b"], plain[0]["b"], rtol=1e-5, atol=1e-7)
