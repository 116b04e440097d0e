"""`fp8.moe.route` against a loop in Python: which choice is in which row, and the way back."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8


def slots_of(tokens, k, experts, devices, factor):
    most = tokens * min(k, experts // devices)
    return most if factor is None else min(most, math.ceil(factor * tokens * k / devices))


def kept(chosen, experts, devices, factor):
    """The (token, choice) pairs of one device that are sent to each device."""
    tokens, k = chosen.shape
    here, slots = experts // devices, slots_of(tokens, k, experts, devices, factor)
    pairs = [(t, j) for t in range(tokens) for j in range(k) if 0 <= chosen[t, j] < experts]
    if slots < tokens * min(k, here):
        first = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    else:  # only a repeated expert can lack a slot
        first = sorted(pairs, key=lambda pair: (chosen[pair], *pair))
    sent = collections.defaultdict(list)
    for pair in first:
        peer = sent[chosen[pair] // here]
        if len(peer) < slots:
            peer.append(pair)
    dropped = len(pairs) - sum(map(len, sent.values()))
    return sent, dropped


def rows_of(chosen, experts, devices, factor):
    """For each device its rows, as (expert, source device, token, choice), in their order."""
    rows = [[] for _ in range(devices)]
    for source, mine in enumerate(chosen):
        for peer, pairs in kept(mine, experts, devices, factor)[0].items():
            rows[peer] += [(mine[pair], source, *pair) for pair in pairs]
    return [sorted(each) for each in rows]


@functools.cache
def program(devices, tokens, k, experts, factor):
    mesh = jax.make_mesh(
        (devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )

    def local(chosen, ids):
        way = fp8.moe.route(chosen, experts=experts, axis="expert", capacity_factor=factor)
        rows = fp8.moe.dispatch(way, ids)
        choices = fp8.moe.dispatch(way.of_choices, jnp.tile(jnp.arange(1.0, k + 1), tokens))
        back = fp8.moe.combine(way, rows * choices)
        return rows, choices, way.sizes, way.dropped[None], back

    split = P("expert")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))


def run(chosen, experts, factor):
    """On devices along "expert": rows of ids, sizes, dropped, and what comes back to tokens."""
    devices, tokens, k = chosen.shape
    ids = np.arange(1, devices * tokens + 1, dtype=np.float32)
    out = program(devices, tokens, k, experts, factor)(chosen.reshape(-1, k), ids)
    return [np.asarray(each).reshape(devices, -1) for each in out]


# Devices, tokens and experts of each, choices and capacity: pairs that matter. Each is a program.
SHAPES = [
    (1, 5, 3, 4, None),
    (1, 1, 1, 1, 1.0),
    (2, 5, 3, 4, 0.3),
    (2, 1, 3, 4, 2.5),
    (4, 5, 3, 4, 1.0),
    (4, 1, 3, 1, None),
    (4, 5, 3, 4, None),
]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(SHAPES),
    repeats=st.booleans(),
)
def test_rows_are_those_of_a_loop(seed, shape, repeats):
    devices, tokens, k, here, factor = shape
    experts, draw = devices * here, np.random.default_rng(seed)
    k = min(k, experts)
    shape = devices, tokens, k
    if repeats:  # also numbers that are no expert
        chosen = draw.integers(-1, experts, shape)
    else:
        chosen = np.argsort(draw.random((devices, tokens, experts)), axis=2)[:, :, :k]
        chosen = np.where(draw.random(shape) < 0.2, -1, chosen)
    chosen = chosen.astype(np.int32)
    rows, choices, sizes, dropped, back = run(chosen, experts, factor)
    want = rows_of(chosen, experts, devices, factor)
    total = np.zeros((devices, tokens))
    for device, pairs in enumerate(want):
        n = len(pairs)
        ids = [1 + source * tokens + token for _, source, token, _ in pairs]
        assert rows[device, :n].tolist() == ids
        assert choices[device, :n].tolist() == [1 + choice for *_, choice in pairs]
        assert not rows[device, n:].any()
        of_experts = [sum(e == device * here + i for e, *_ in pairs) for i in range(here)]
        assert sizes[device].tolist() == of_experts
        for _, source, token, choice in pairs:
            total[source, token] += (1 + source * tokens + token) * (1 + choice)
    np.testing.assert_array_equal(back, total)
    lost = [kept(mine, experts, devices, factor)[1] for mine in chosen]
    assert dropped[:, 0].tolist() == lost
    if factor is None and not repeats:
        assert not any(lost)


def test_gradients_are_the_transposes():
    chosen = np.int32([[0, 2], [2, 1], [1, -1]])
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)

    @jax.jit
    def run(chosen, x, rows):
        way = fp8.moe.route(chosen, experts=3)
        y, to_tokens = jax.vjp(lambda x: fp8.moe.dispatch(way, x), x)
        back, to_rows = jax.vjp(lambda rows: fp8.moe.combine(way, rows), rows)
        return y, back, to_tokens(rows)[0], to_rows(x)[0]

    y, back, of_dispatch, of_combine = map(np.asarray, run(chosen, x, rows))
    np.testing.assert_array_equal(of_dispatch, back)
    np.testing.assert_array_equal(of_combine, y)
    assert float(np.vdot(y, rows)) == float(np.vdot(x, back))


def test_a_sum_over_choices_is_rounded_once():
    rows = np.array([256, 1, 1], jnp.bfloat16)  # 256 + 1 is 256 in bfloat16

    @jax.jit
    def run(chosen):
        return fp8.moe.combine(fp8.moe.route(chosen, experts=3), rows)

    assert float(run(np.int32([[0, 1, 2]]))[0]) == 258.0


def test_arrays_of_numpy():
    x, rows = np.arange(4, dtype=np.float32).reshape(2, 2), np.arange(4, dtype=np.float32)

    @jax.jit  # as constants, because arguments would be jax's arrays
    def run():
        way = fp8.moe.route(np.array([[0, 2], [2, 1]]), experts=3)
        both = fp8.moe.dispatch(way, x), fp8.moe.dispatch(way, jnp.array(x))
        return both, fp8.moe.combine(way, rows)

    both, combined = run()
    np.testing.assert_array_equal(*both)
    np.testing.assert_array_equal(combined, [2.0, 4.0])


a_route = jax.jit(lambda chosen: fp8.moe.route(chosen, experts=3))


@pytest.mark.parametrize("shape", [(), (1, 3), (3, 3), (4, 3)])
def test_another_number_of_tokens_or_rows_is_refused(shape):
    way = a_route(np.int32([[0, 2], [2, 1]]))
    says = (
        r"takes values of tokens, \[2, ...\].* value of each choice, \[4, ...\], pass route.of_ch"
    )
    with pytest.raises(ValueError, match=says):
        fp8.moe.dispatch(way, np.ones(shape, np.float32))
    if shape[:1] != (4,):
        with pytest.raises(ValueError, match=r"takes rows of experts, \[4, ...\]"):
            fp8.moe.combine(way, np.ones(shape, np.float32))
        with pytest.raises(ValueError, match=r"takes values of tokens, \[4, ...\] for this route"):
            fp8.moe.dispatch(way.of_choices, np.ones(shape, np.float32))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int16"])
def test_every_dtype_of_integers(dtype):
    way = a_route(np.array([[0, 2], [2, 1]], dtype))
    assert way.sizes.tolist() == [1, 1, 2]


def test_traced_numbers_that_are_no_expert_are_not_sent():
    way = a_route(np.array([[0, 2**32 - 1], [7, 1]], np.uint32))
    assert way.sizes.tolist() == [1, 1, 0]
    assert int(way.dropped) == 0


@pytest.mark.parametrize(
    ("chosen", "options", "error", "words"),
    [
        (jnp.ones((2, 2)), {}, TypeError, ["float32", "integers"]),
        (jnp.ones(3, jnp.int32), {}, ValueError, ["[3]", "[T, k]"]),
        (jnp.ones((0, 2), jnp.int32), {}, ValueError, ["[0, 2]", "token"]),
        (jnp.full((2, 2), 4), {}, ValueError, ["expert 4", "0 to 3", "-1"]),
        (jnp.ones((2, 2), jnp.int32), {"axis": "expert"}, ValueError, ["'expert'", "shard_map"]),
        (jnp.ones((2, 2), jnp.int32), {"capacity_factor": 0}, ValueError, ["0", "1.25"]),
        (jnp.ones((2, 2), jnp.int32), {"capacity_factor": "x"}, ValueError, ["'x'", "1.25"]),
        (jnp.ones((2, 2), jnp.int32), {"experts": 0}, ValueError, ["experts=0", "at least 1"]),
    ],
)
def test_bad_input_gets_a_clear_error(chosen, options, error, words):
    with pytest.raises(error) as raised:
        fp8.moe.route(chosen, **{"experts": 4, **options})
    for word in words:
        assert word in str(raised.value)


def test_tokens_that_are_not_split_over_the_axis_are_refused():
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    local = lambda chosen: fp8.moe.route(chosen, experts=4, axis="expert").sizes
    chosen = jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match="same on all devices"):
        jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("expert"))(chosen)
    local = lambda chosen: fp8.moe.route(chosen, experts=5, axis="expert").sizes
    with pytest.raises(ValueError, match="multiple of 2"):
        jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))(chosen)
