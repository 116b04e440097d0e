"""What gradient release refuses: arithmetic on a `Released`, and other wrong uses."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optim_cases import quantized
from release_cases import body, inputs, loss_of, plain_step, stacked
from same_bits import assert_same_bits

from jaxfp8.optim import release

pytestmark = pytest.mark.usefixtures("standard_promotion")
CLIP = optax.clip_by_global_norm(1.0)
STACK = release(optax.sgd(0.5))


@functools.cache
def start():
    return jax.jit(STACK.init)(stacked())


def loss_fn(layers, x):
    return loss_of(STACK.scan, body, layers, x)


value_and_grad = jax.jit(jax.value_and_grad(loss_fn))


def check_broken(layers):
    """The cause has a name, and the next loss is NaN."""
    with pytest.raises(ValueError, match="changed by arithmetic"):
        layers.check()
    layers = dataclasses.replace(start(), _values=layers._values, seal=layers.seal)
    loss, again = value_and_grad(layers, inputs(0))
    assert jnp.isnan(loss)
    with pytest.raises(ValueError, match="changed by arithmetic"):
        again.check()


ARITHMETIC = {
    "scaled": lambda layers: jax.tree.map(lambda x: x / 2, layers),
    "clipped": lambda layers: CLIP.update(layers, CLIP.init(layers))[0],
    "added": lambda layers: optax.apply_updates(start(), layers),
    "mean": lambda layers: jax.tree.map(lambda x: (x + x) / 2, layers),
    "mean of halves": lambda layers: jax.tree.map(lambda x: x / 2 + x / 2, layers),
    "in bfloat16": lambda layers: jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(x.dtype), layers
    ),
}


@pytest.mark.parametrize(
    ("name", "jit"),
    [
        pytest.param(
            name,
            jit,
            id=f"{'compiled' if jit else 'op by op'}-{name}",
            # The norm of all leaves is forty programs. The compiled one has the same arithmetic.
            marks=pytest.mark.slow if (name, jit) == ("clipped", False) else (),
        )
        for jit in (False, True)
        for name in ARITHMETIC
    ],
)
def test_arithmetic_on_a_released(name, jit):
    if jit:
        check_broken(changed_in_a_program()[name])
    else:
        check_broken(ARITHMETIC[name](value_and_grad(start(), inputs(0))[1]))


@functools.cache
def changed_in_a_program():
    """Each of ARITHMETIC, in the program of the step."""

    def step(layers, x):
        layers = jax.grad(loss_fn)(layers, x)
        return {name: change(layers) for name, change in ARITHMETIC.items()}

    return jax.jit(step)(start(), inputs(0))


def sum_of(layers, xs):
    return jax.lax.scan(lambda total, x: (total + loss_fn(layers, x), None), 0.0, xs)[0]


def test_microbatches_that_sum_gradients():
    xs = np.stack([inputs(0), inputs(1)])
    check_broken(jax.jit(jax.grad(sum_of))(start(), xs))


@functools.cache
def plain():
    """The parameters after the usual step."""
    tx = optax.sgd(0.5)
    (params, _), _, _ = plain_step(tx, body, (stacked(), jax.vmap(tx.init)(stacked())), inputs(0))
    return params


def check_is_a_step(layers):
    layers.check()
    for one, other in zip(jax.tree.leaves(layers.params), jax.tree.leaves(plain()), strict=True):
        tolerance = 2.0**-8 if one.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.float32(one), np.float32(other), rtol=tolerance, atol=tolerance / 10
        )


def carried(layers, xs):
    """A loss that carries the `Released` from microbatch to microbatch."""
    one = lambda c, x: ((c[0], c[1] + loss_fn(c[0], x)), None)
    return jax.lax.scan(one, (layers, 0.0), xs)[0][1]


def stacked_again(layers, xs):
    layers = jax.tree.map(lambda x: x[None], layers)
    both = (layers, xs)
    return jax.lax.scan(lambda total, one: (total + loss_fn(*one), None), 0.0, both)[0]


def of_many_steps(layers, xs):
    """It is no loss: each iteration is a step."""
    return jax.lax.scan(lambda layers, x: (jax.grad(loss_fn)(layers, x), None), layers, xs)[0]


ONCE = {
    "closed over": jax.grad(sum_of),
    "carried": jax.grad(carried),
    "stacked again": jax.grad(stacked_again),
    "steps": of_many_steps,
}


@pytest.mark.parametrize("name", ONCE)
def test_a_scan_over_one_microbatch_is_a_step(name):
    check_is_a_step(jax.jit(ONCE[name])(start(), inputs(0)[None]))


def test_op_by_op_a_scan_over_one_microbatch_adds_zeros():
    """So it makes 0 of -0, as in `test_a_sum_with_zeros`."""
    check_broken(ONCE["closed over"](start(), inputs(0)[None]))


def where(flag, layers, others):
    return jax.tree.map(lambda x, y: jnp.where(flag, x, y), layers, others)


@functools.cache
def chosen_by_a_flag():
    """The gradients of the chosen `Released` and of the other one, and a step that is skipped."""

    def step(flag, layers, others, x):
        loss = lambda both: loss_fn(where(flag, *both), x)
        kept = where(flag, jax.grad(loss_fn)(layers, x), layers)
        return jax.grad(loss)((layers, others)), kept

    return jax.jit(step)


@pytest.mark.parametrize("first", [True, False])
def test_a_released_that_a_flag_chooses(first):
    others = jax.jit(STACK.init)(stacked(1))
    both = (start(), others) if first else (others, start())
    new, _ = chosen_by_a_flag()(first, *both, inputs(0))
    check_is_a_step(new[0 if first else 1])
    # Its gradient is 0, so the next parameters would be 0.
    check_broken(new[1 if first else 0])


def test_a_mask_of_values_does_not_choose():
    others = jax.jit(STACK.init)(stacked(1))
    mask = lambda x: jnp.arange(x.size).reshape(x.shape) % 2 == 0
    mixed = lambda both: jax.tree.map(lambda x, y: jnp.where(mask(x), x, y), *both)
    for new in jax.jit(jax.grad(lambda both: loss_fn(mixed(both), inputs(0))))((start(), others)):
        check_broken(new)


def test_a_step_that_is_skipped():
    for flag in (True, False):
        _, kept = chosen_by_a_flag()(flag, start(), start(), inputs(0))
        if flag:
            check_is_a_step(kept)
        else:
            assert_same_bits(kept, start())


@pytest.mark.parametrize("jit", [False, True], ids=["op by op", "compiled"])
def test_a_sum_with_zeros(jit):
    """It makes 0 of -0, so of the code 128. XLA drops such a sum. Then no bit has changed."""
    stack = release(optax.GradientTransformation(_codes, lambda grads, codes, _: (grads, codes)))
    layers = jax.jit(dataclasses.replace(stack, per_layer=True).init)(stacked())

    def step(layers, x):
        layers = jax.grad(lambda layers: loss_of(stack.scan, body, layers, x))(layers)
        return layers, jax.tree.map(lambda x: x + jnp.zeros_like(x), layers)

    same, added = (jax.jit(step) if jit else step)(layers, inputs(0))
    if jit:
        added.check()
        assert_same_bits(added, same)
    else:
        assert np.any(added.opt_state != same.opt_state)
        check_broken(added)


def _codes(params):
    return jnp.arange(256).astype(jnp.uint8)


def test_examples_mapped_over_one_released():
    def mean_of(layers, xs):
        return jnp.mean(jax.vmap(loss_fn, in_axes=(None, 0))(layers, xs))

    xs = np.stack([inputs(i) for i in range(2)])
    refused(lambda layers: mean_of(layers, xs), match="maps 2 examples over one Released")
    with pytest.raises(ValueError, match="maps 2 examples over one Released"):
        jax.eval_shape(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)), start(), xs)


def test_an_ensemble():
    """Each model has a `Released` of its own."""
    xs = np.stack([inputs(i) for i in range(2)])
    layers = [jax.jit(STACK.init)(stacked(i)) for i in range(2)]
    both = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    new = jax.device_get(jax.jit(jax.vmap(jax.grad(loss_fn)))(both, xs))
    for i, one in enumerate(layers):
        mine = jax.tree.map(lambda x, i=i: x[i], new)
        _, alone = value_and_grad(one, xs[i])
        mine.check()
        np.testing.assert_allclose(mine.params["b"], alone.params["b"], rtol=1e-4)


def test_a_loss_that_does_not_use_the_layers():
    check_broken(jax.grad(lambda layers: jnp.float32(1.0))(start()))


def refused(loss, *, match, layers=None):
    """While tracing: without jit the same rules are traced, and first what stands before them."""
    with pytest.raises(ValueError, match=re.compile(match, re.DOTALL)):
        jax.eval_shape(jax.grad(loss), start() if layers is None else layers)


def test_two_scans_of_one_loss():
    refused(
        lambda layers: loss_fn(layers, inputs(0)) + loss_fn(layers, inputs(1)), match="two scans"
    )
    fixed = lambda layers: (
        loss_fn(layers, inputs(0)) + loss_fn(jax.lax.stop_gradient(layers), inputs(1))
    )
    jax.jit(jax.grad(fixed))(start()).check()


def test_parameters_used_outside_of_the_scan():
    refused(
        lambda layers: loss_fn(layers, inputs(0)) + jnp.sum(layers.params["b"]),
        match=r"differentiates Released\.params",
    )


def test_parameters_used_outside_of_the_scan_without_a_gradient():
    def loss(layers, x):
        return loss_fn(layers, x) + jnp.sum(jax.lax.stop_gradient(layers).params["b"])

    for run in (jax.grad(loss), jax.jit(jax.grad(loss))):
        run(start(), inputs(0)).check()


def test_a_part_of_a_released():
    layers = start()
    part = lambda values: loss_fn(dataclasses.replace(layers, _values=values), inputs(0))
    with pytest.raises(ValueError, match="a part of a Released"):
        jax.grad(part)(layers._values)


def test_second_derivatives():
    layers = start()
    twice = lambda x: jnp.sum(jax.grad(loss_fn)(layers, x)._values["b"])
    with pytest.raises(ValueError, match="differentiated twice"):
        jax.grad(twice)(inputs(0))


def test_shard_map_without_types():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        jax.grad(loss_fn),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match="check_vma=True"):
        jax.eval_shape(run, start(), jnp.ones((8, 8)))


def test_arguments_of_scan():
    layers = start()
    with pytest.raises(ValueError, match="xs has 0 nodes of Released"):
        STACK.scan(body, inputs(0), stacked())
    with pytest.raises(ValueError, match="xs has 2 nodes of Released"):
        STACK.scan(body, inputs(0), (layers, layers))
    with pytest.raises(ValueError, match="no array of floats"):
        STACK.scan(lambda x, p: (x, None), 1, layers)
    with pytest.raises(TypeError, match="same pytree structure"):
        STACK.scan(lambda x, p: ((x, x), None), inputs(0), layers)
    with pytest.raises(ValueError, match="the same size, the number of layers"):
        STACK.scan(body, inputs(0), (layers, jnp.ones(7)))


def test_an_optimizer_that_returns_another_state():
    """As a state of a `Released` from another optimizer."""
    tx = optax.GradientTransformation(
        lambda params: {"old": jnp.zeros(2)}, lambda grads, state, params: (grads, (jnp.zeros(2),))
    )
    stack = release(tx)
    with pytest.raises(ValueError, match="another state"):
        jax.eval_shape(
            lambda: jax.grad(lambda layers: loss_of(stack.scan, body, layers, inputs(0)))(
                stack.init(stacked())
            )
        )


def test_parameters_that_cannot_be_released():
    with pytest.raises(TypeError, match=r"params\['table'\] is int32"):
        STACK.init({"table": np.ones((3, 2), np.int32)})
    with pytest.raises(ValueError, match="the same size, the number of layers"):
        STACK.init({"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)})
    weight = jax.eval_shape(quantized, jax.ShapeDtypeStruct((128, 128), jnp.float32))
    with pytest.raises(TypeError, match="QuantizedWeight"):
        STACK.pack({"w": weight}, ())
    with pytest.raises(TypeError, match=r"jax\.random\.key_data"):
        STACK.pack({"w": np.ones((3, 2), np.float32)}, jax.random.split(jax.random.key(0), 3))
    with pytest.raises(TypeError, match="int4"):
        STACK.pack({"w": np.ones((3, 2), np.float32)}, np.ones(3, jnp.int4))
    assert np.all(jax.jit(STACK.init)({"w": np.ones((3, 2), np.float32)}).params["w"] == 1)


def test_values_that_replace_nan_are_found():
    """Carriers of 8 bits can be NaN, so `zero_nans` would change codes."""
    clean = optax.zero_nans()
    layers, _ = clean.update(start(), clean.init(start()))
    with pytest.raises(ValueError, match="changed by arithmetic"):
        layers.check()
