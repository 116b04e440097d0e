"""The law of FP8 on the wire.

Gather(quantize(shard)) is quantize(gather(shard)), bit for bit, for every granularity.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

D = 4
GRANULARITIES = {
    "tensor": fp8.PerTensor(),
    "rows": fp8.PerAxis(0),
    "columns": fp8.PerAxis(1),
    "1x32": fp8.PerBlock((1, 32)),
    "32x1": fp8.PerBlock((32, 1)),
    "32x32": fp8.PerBlock((32, 32)),
}
RULES = {"float32": {}, "power of two": {"power_of_two": True}, "E8M0": {"scale_format": fp8.E8M0}}
X = np.random.default_rng(0).standard_t(2, (32 * D, 32 * D)).astype(np.float32)
X[5] = 0
X[:32, 32:64] = 0  # a tile of zeros has byte 0, a subnormal scale that CPUs flush


def on_devices(function, *specs, out, vma=True):
    mesh = jax.make_mesh((D,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:D])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=vma))


def quantized_shard(x, granularity, axis, **rule):
    """As a matmul does it: a cell that spans devices gets the amax of all of them."""
    if granularity.has_cells_along(axis, x.ndim):
        return fp8.quantize(x, fp8.E4M3, granularity, **rule)
    amax = lax.pmax(fp8.numerics.amax(x, granularity), "d")
    m = fp8.numerics.encoding_multiplier(amax, fp8.E4M3, **rule)
    # The scale of the whole, as fp8.quantize(x, ..) has it on one device.
    return fp8.quantize(x, fp8.E4M3, granularity, scale=fp8.numerics._scale.inverse(m))


quantize_whole = jax.jit(
    fp8.quantize, static_argnums=(1, 2), static_argnames=("power_of_two", "scale_format")
)


def bits(q):
    return tuple(np.atleast_1d(np.asarray(leaf)).view(np.uint8) for leaf in (q.values, q.scale))


def cases():
    for name, granularity in GRANULARITIES.items():
        for rule in RULES:
            if rule != "E8M0" or isinstance(granularity, fp8.PerBlock):
                for axis in (0, 1):
                    quick = rule == "power of two" or (rule, axis, name) in {
                        ("float32", 0, "rows"),
                        ("E8M0", 1, "32x32"),
                    }
                    yield pytest.param(
                        granularity,
                        RULES[rule],
                        axis,
                        id=f"{name}-{rule}-axis {axis}",
                        marks=() if quick else pytest.mark.slow,
                    )


@pytest.mark.parametrize(("granularity", "rule", "axis"), list(cases()))
def test_gathered_is_quantized_whole(granularity, rule, axis):
    spec = P("d") if axis == 0 else P(None, "d")

    def gather(x):
        shard = quantized_shard(x, granularity, axis, **rule)  # with the scales of the whole
        q = fp8.comms.all_gather(shard, "d", axis=axis, common_scale=True)
        return jax.tree.map(lambda leaf: leaf[None], (q.values, q.scale))

    values, scale = on_devices(gather, spec, out=P("d"), vma=False)(X)
    want = quantize_whole(X, fp8.E4M3, granularity, **rule)
    for device in range(D):
        np.testing.assert_array_equal(np.asarray(values)[device].view(np.uint8), bits(want)[0])
        np.testing.assert_array_equal(
            np.atleast_1d(np.asarray(scale)[device]).view(np.uint8), bits(want)[1]
        )


@pytest.mark.parametrize(
    "granularity", [fp8.PerAxis(0, 1), fp8.PerBlock((1, 32)), fp8.PerTensor()], ids=repr
)
def test_all_to_all_moves_tokens_to_experts(granularity):
    """[E, tokens of this device, K] becomes [experts of this device, tokens of all, K]."""
    x = X.reshape(D, 32, 32 * D)  # experts, tokens, features

    def exchange(x):
        q = (
            quantized_shard(x, granularity, 1)
            if granularity == fp8.PerTensor()
            else fp8.quantize(x, fp8.E4M3, granularity)
        )
        return fp8.comms.all_to_all(q, "d", split_axis=0, concat_axis=1)

    scales = P() if granularity == fp8.PerTensor() else P("d")
    moved = on_devices(
        exchange, P(None, "d"), out=fp8.QuantizedTensor(P("d"), scales, granularity, x.dtype)
    )(x)
    want = quantize_whole(x, fp8.E4M3, granularity)
    for mine, theirs in zip(bits(moved), bits(want), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("rule", RULES)
def test_ppermute_passes_tiles_round(rule):
    ring = [(i, (i + 1) % D) for i in range(D)]
    granularity = fp8.PerBlock((1, 32))

    def shift(x):
        return fp8.comms.ppermute(fp8.quantize(x, fp8.E4M3, granularity, **RULES[rule]), "d", ring)

    spec = fp8.QuantizedTensor(P("d"), P("d"), granularity, jnp.dtype(X.dtype), rule != "float32")
    moved = on_devices(shift, P("d"), out=spec)(X)
    want = quantize_whole(np.roll(X, len(X) // D, axis=0), fp8.E4M3, granularity, **RULES[rule])
    for mine, theirs in zip(bits(moved), bits(want), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def quantize_and(collective, granularity):
    return lambda x: collective(fp8.quantize(x, fp8.E4M3, granularity)).dequantize()


GATHER = functools.partial(fp8.comms.all_gather, axis_name="d")
EXCHANGE = functools.partial(fp8.comms.all_to_all, axis_name="d", split_axis=1, concat_axis=0)
MISUSE = {
    "a scale for each device": (
        GATHER,
        fp8.PerTensor(),
        ("scale", "PerTensor()", "'d'", "lax.pmax(amax, 'd')"),
    ),
    "a scale for each device that is said to be common": (
        functools.partial(GATHER, common_scale=True),
        fp8.PerTensor(),
        ("scale", "PerTensor()", "'d'"),
    ),
    "split rows": (
        functools.partial(GATHER, axis=0),
        fp8.PerAxis(1),
        ("PerAxis(1)", "spans axis 0"),
    ),
    "cut tiles": (
        GATHER,
        fp8.PerBlock((64, 1)),
        ("shards of 32 along axis 0", "(64, 1)", "multiples of 64"),
    ),
    "no such axis": (functools.partial(GATHER, axis=2), fp8.PerAxis(0), ("axis=2", "out of range")),
    "scales along one axis": (
        EXCHANGE,
        fp8.PerAxis(0),
        ("split_axis=1", "concat_axis=0", "scales vary along axis 0 only"),
    ),
    "parts cut tiles": (
        EXCHANGE,
        fp8.PerBlock((32, 64)),
        ("shards of 32 along axis 1", "multiples of 64"),
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse(case):
    collective, granularity, parts = MISUSE[case]
    with pytest.raises(ValueError, match=mentions(*parts)):
        on_devices(quantize_and(collective, granularity), P("d"), out=P("d"))(X)


def test_without_types_somebody_has_to_say_that_a_scale_is_common():
    def gathered(**how):
        def local(x):
            scale = jax.lax.pmax(jnp.max(jnp.abs(x)), "d") / 448
            return GATHER(fp8.quantize(x, fp8.E4M3, scale=scale), **how).dequantize()

        return jax.jit(
            jax.shard_map(
                local,
                mesh=jax.make_mesh((D,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
                in_specs=P("d"),
                out_specs=P(),
                check_vma=False,
            )
        )(X)

    with pytest.raises(
        ValueError, match=mentions("scale", "'d'", "check_vma=False", "common_scale=True")
    ):
        gathered()
    whole = fp8.quantize(X, fp8.E4M3, scale=np.abs(X).max() / np.float32(448))
    np.testing.assert_allclose(gathered(common_scale=True), whole.dequantize(), rtol=1e-6)


@pytest.mark.parametrize(
    "collective", [GATHER, EXCHANGE, lambda q: fp8.comms.ppermute(q, "d", [(0, 0)])]
)
def test_outside_of_shard_map(collective):
    with pytest.raises(
        ValueError, match=mentions("['d'] are no manual mesh axes", "inside jax.shard_map")
    ):
        collective(fp8.quantize(X, fp8.E4M3, fp8.PerAxis(0, 1)))


def test_misuse_of_shards():
    w = jnp.ones((32, 16))
    dot = functools.partial(fp8.dot, jnp.ones((8, 32)), recipe=fp8.recipes.current())
    with pytest.raises(ValueError, match=mentions("w_shard", "out of range", "[32, 16]")):
        dot(w, w_shard=Shard(2, "fsdp"))
    with pytest.raises(TypeError, match=mentions("w_shard='fsdp'", "Shard(0,")):
        dot(w, w_shard="fsdp")
    with pytest.raises(TypeError, match=mentions("axis='fsdp'", "axis_name=0")):
        Shard("fsdp", 0)
    part = functools.partial(fp8.dot, recipe=fp8.recipes.current(), x_shard=Shard(0, "d"))
    with pytest.raises(
        ValueError, match=mentions("every device along ['d'] has the same x", "in_specs")
    ):
        on_devices(part, P(), P("d"), out=P("d"))(jnp.ones((8, 32)), jnp.ones((128, 16)))
    wrong = functools.partial(fp8.dot, recipe=fp8.recipes.current(), w_shard=Shard(1, "d"))
    with pytest.raises(
        ValueError, match=mentions("contracted axes", "whole operands", "w_shard=Shard(axis=1")
    ):
        on_devices(wrong, P("d"), P("d"), out=P("d"))(jnp.ones((8, 32)), w)
    delayed = fp8.recipes.delayed()
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * D), fp8.init_state(delayed))

    def local(x, w, state):
        own = jax.tree.map(lambda leaf: leaf[0], state)
        return fp8.dot(x, w, recipe=delayed, state=own, w_shard=Shard(0, "d"))

    with pytest.raises(
        fp8.FP8StateError, match=mentions("w is gathered over ['d']", "its state varies over it")
    ):
        on_devices(local, P("d"), P("d"), P("d"), out=P("d"))(jnp.ones((8, 32)), w, state)
    tiles = functools.partial(fp8.dot, recipe=fp8.recipes.mxfp8(), w_shard=Shard(0, "d"))
    with pytest.raises(ValueError, match=mentions("shards of 16 along axis 0", "multiples of 32")):
        on_devices(tiles, P("d"), P("d"), out=P("d"))(jnp.ones((8, 64)), jnp.ones((64, 16)))
