"""Devices that share a state commit the amaxes of the whole batch: the bits of one device.

The parts of each tensor have different amaxes. In the first step the last part has the largest, in
the second step the first part. In the third step one part of x has an inf, and one part of the
gradient of y has a NaN.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from primitives import count

import jaxfp8 as fp8
from jaxfp8.sharding import Shard
from jaxfp8.state._together import _MOST_STACKED

RECIPE = fp8.recipes.delayed(history_length=4)
AXES = ("data", "model")
BOTH, DATA, COLUMNS, GRID = P(AXES), P("data"), P(None, "model"), P("data", "model")
W_ROWS, X_ROWS = {"w_shard": Shard(0, "model")}, {"x_shard": Shard(0, "model")}


class Layout(NamedTuple):
    """Specs of x, w and the gradient of y; what is gathered; the axes to name without types."""

    specs: tuple[P, P, P]
    shards: dict[str, Shard]
    named: tuple[str, ...]


LAYOUTS = {
    "batch": Layout((BOTH, P(), BOTH), {}, AXES),
    "data and tensor": Layout((DATA, COLUMNS, GRID), {}, AXES),
    "w gathered": Layout((BOTH, P("model"), BOTH), W_ROWS, AXES),
    "x gathered": Layout((BOTH, COLUMNS, GRID), X_ROWS, AXES),
    # The shard itself says that its amax spans an axis. Nothing else is split over that axis, so
    # the caller does not name it.
    "w gathered alone": Layout((DATA, P("model"), DATA), W_ROWS, ("data",)),
    "x gathered alone": Layout((BOTH, P(), DATA), X_ROWS, ("data",)),
    "w gathered over both": Layout((P(), P(None, AXES), P()), {"w_shard": Shard(1, AXES)}, ()),
    "x gathered over both": Layout((BOTH, P(), P()), {"x_shard": Shard(0, AXES)}, ()),
}
# Whether types tell, and whether the gradient is taken inside shard_map or of it.
WAYS = ("types, inside", "types, outside", "no types, inside")


def mesh():
    return jax.make_mesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2)


@functools.cache
def batch(step):
    """x, w and the gradient of y, [8, 8]."""
    random = np.random.default_rng(step)
    arrays = [(random.uniform(-1, 1, (8, 8)) * 3.0**step).astype(np.float32) for _ in range(3)]
    corner = (-1, 0)[step % 2]
    for array in arrays:
        array[corner, corner] = 1.5 * np.max(np.abs(array))
    if step == 2:
        arrays[0][5, 2], arrays[2][2, 5] = np.inf, np.nan
    return arrays


def loss(w, state, x, c, **shards):
    return jnp.sum(fp8.dot(x, w, recipe=RECIPE, state=state, **shards) * c)


@jax.jit
def on_one_device(w, state, x, c):
    return fp8.value_and_grad(loss)(w, state, x, c)[2]


def on_mesh(layout, way, *, commit=True):
    """`(w, state, x, c) -> new state`, or what was seen."""
    types, (x, w, c) = way.startswith("types"), layout.specs
    share = functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(w, P(), x, c), out_specs=P(), check_vma=types
    )  # fmt: skip
    part = functools.partial(loss, **layout.shards)
    named = {} if types else {"reduce_axes": layout.named}
    gradient = functools.partial(fp8.value_and_grad, commit=commit, **named)
    if way.endswith("outside"):
        step = gradient(share(lambda *args: lax.psum(part(*args), AXES)))
        return jax.jit(lambda *args: step(*args)[2])
    return jax.jit(share(lambda *args: gradient(part)(*args)[2]))


def assert_parts_differ(layout, tensors):
    for value, spec in zip(tensors, layout.specs, strict=True):
        parts = jax.device_put(value, jax.NamedSharding(mesh(), spec)).addressable_shards
        amaxes = {str(part.index): float(np.max(np.abs(part.data))) for part in parts}
        assert len(set(amaxes.values())) == len(amaxes)


def assert_same_on_every_device(state, wanted):
    for leaf, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        # Without types nothing checks that devices agree, and the array shows the first of them.
        for device in leaf.addressable_shards:
            np.testing.assert_array_equal(device.data, want)


# For each way one layout without gathered operands and one with them. Without types there is also
# one that names no axis at all.
QUICK = {
    ("data and tensor", "types, inside"), ("w gathered", "types, inside"),
    ("data and tensor", "types, outside"), ("x gathered", "types, outside"),
    ("data and tensor", "no types, inside"), ("x gathered alone", "no types, inside"),
    ("w gathered over both", "no types, inside"),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=() if case in QUICK else (pytest.mark.slow,))
    for case in [(layout, way) for layout in LAYOUTS for way in WAYS]
]


@pytest.mark.parametrize(("layout", "way"), CASES)
def test_states_are_those_of_one_device(layout, way):
    layout, state, want = LAYOUTS[layout], fp8.init_state(RECIPE), fp8.init_state(RECIPE)
    step = on_mesh(layout, way)
    # As a step returns it; else the second step would be another program.
    state = jax.device_put(state, jax.NamedSharding(mesh(), P()))
    for i in range(3):
        x, w, c = batch(i)
        if i < 2:
            assert_parts_differ(layout, (x, w, c))
        state, want = step(w, state, x, c), on_one_device(w, want, x, c)
        assert_same_on_every_device(state, want)
    np.testing.assert_array_equal(want.nonfinite_steps, [1, 0, 1])


@pytest.mark.parametrize(
    ("layout", "way"),
    [("data and tensor", "types, outside"), ("w gathered alone", "no types, inside")],
)
def test_microbatches_are_one_batch(layout, way):
    """One microbatch has the larger x, the other the larger gradient."""
    see, state = on_mesh(LAYOUTS[layout], way, commit=False), fp8.init_state(RECIPE)
    (x, w, c), (larger_x, _, larger_c) = batch(0), batch(1)
    seen = see(w, state, larger_x, c), see(w, state, x, larger_c)
    whole = np.concatenate([larger_x, x]), np.concatenate([c, larger_c])
    # eagerly each operation is a program
    commit = jax.jit(lambda state, *seen: fp8.commit(state, fp8.merge_seen(*seen)))
    assert_same_on_every_device(commit(state, *seen), on_one_device(w, state, *whole))


@pytest.mark.parametrize("layout", ["data and tensor", "w gathered", "x gathered"])
def test_types_need_one_reduction_for_all_states(layout):
    """One more in each matmul would make all devices wait for each other in each layer."""
    x, w, c = batch(0)
    step = on_mesh(LAYOUTS[layout], "types, inside")
    program = jax.make_jaxpr(step)(w, fp8.init_state(RECIPE), x, c).jaxpr
    unset = 3  # casts of x, w and g in the branch of a step whose scales are unset
    assert count(program, "pmax") == unset + 1


@pytest.mark.parametrize(
    "types",
    [
        pytest.param(True, id="types"),
        pytest.param(False, id="no types", marks=pytest.mark.slow),
    ],
)
def test_more_layers_than_a_stack_holds_need_one_reduction(types):
    """Their states are computed on in several stacks."""
    layers = _MOST_STACKED + 2
    x, w, _ = batch(0)

    def deep(w, states, x):
        for state in states:
            x = fp8.dot(x, w, recipe=RECIPE, state=state)
        return jnp.sum(x)

    named = {} if types else {"reduce_axes": AXES}
    step = lambda *given: fp8.value_and_grad(deep, **named)(*given)[2]
    on_mesh = jax.shard_map(
        step, mesh=mesh(), in_specs=(P(), P(), BOTH), out_specs=P(), check_vma=types
    )
    states = [fp8.init_state(RECIPE)] * layers
    one_device = jax.jit(lambda *given: fp8.value_and_grad(deep)(*given)[2])
    settled = fp8.settle(one_device(w, states, x))
    assert count(jax.make_jaxpr(on_mesh)(w, settled, x).jaxpr, "pmax") == 1
    assert_same_on_every_device(jax.jit(on_mesh)(w, settled, x), one_device(w, settled, x))
