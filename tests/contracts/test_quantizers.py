"""What every quantizer has to do; a new quantizer is tested by being in the table."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import SHAPE, hard_arrays
from hard_tiles import assert_equals_oracle, scale_of

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import Cast, Direction, validate
from jaxfp8.numerics._amax import amax as amax_of
from jaxfp8.quantizers import (
    AbstractQuantizer,
    Current,
    Delayed,
    Identity,
    ScaleInputs,
    Static,
)

MX = {"format": fp8.E4M3, "power_of_two": True, "scale_format": fp8.E8M0}

QUANTIZERS = {
    "current": Current(format=fp8.E4M3),
    "current E5M2 power of two": Current(format=fp8.E5M2, power_of_two=True),
    "current rows": Current(
        format=fp8.E4M3, granularity=fp8.quantizers.PerRow(), power_of_two=True
    ),
    "current rows E5M2": Current(format=fp8.E5M2, granularity=fp8.quantizers.PerRow()),
    "blockwise 1x128": Current(
        format=fp8.E4M3, granularity=fp8.PerBlock((1, 128)), power_of_two=True
    ),
    "blockwise 128x128": Current(
        format=fp8.E4M3, granularity=fp8.PerBlock((128, 128)), power_of_two=True
    ),
    "blockwise float32 scales": Current(format=fp8.E4M3, granularity=fp8.PerBlock((1, 128))),
    "blockwise E5M2": Current(
        format=fp8.E5M2, granularity=fp8.PerBlock((1, 128)), power_of_two=True
    ),
    "mx rceil": Current(granularity=fp8.PerBlock((1, 32)), **MX),
    "mx floor": Current(granularity=fp8.PerBlock((1, 32)), **MX, scale_rounding="floor"),
    "mx 32x32": Current(granularity=fp8.PerBlock((32, 32)), **MX),
    "delayed": Delayed(format=fp8.E4M3),
    "delayed margin": Delayed(format=fp8.E5M2, margin=2, power_of_two=True),
    "static": Static(format=fp8.E4M3, scale=0.013),
    "identity": Identity(),
}

pytestmark = pytest.mark.parametrize("name", QUANTIZERS)


# The axis that a matmul keeps, for each of the two that read an operand.
ROWS, COLUMNS = (0,), (1,)


def granularity_of(quantizer, kept=ROWS):
    return quantizer.granularity.for_matmul(kept, ndim=2)


def tile_of(quantizer, kept=ROWS):
    granularity = granularity_of(quantizer, kept)
    return granularity.tile if isinstance(granularity, fp8.PerBlock) else None


def rule_of(quantizer) -> str:
    if quantizer.scale_format == fp8.E8M0:
        return quantizer.scale_rounding
    return "power_of_two" if quantizer.power_of_two else "float32"


def once(quantizer, x, scale, all_set, *directions, amax=None):
    if quantizer.value_format is None:
        return (x,) * len(directions)  # nobody asks it for more
    cast = Cast(
        format=quantizer.value_format,
        directions=tuple(Direction(granularity_of(quantizer, kept)) for kept in directions),
        rule=quantizer.rule,
    )
    stored = scale if quantizer.stateful else None
    inputs = ScaleInputs(amax or functools.partial(amax_of, x), stored, all_set)
    copies, _ = quantizer.quantize(x, cast, inputs)
    return copies


@functools.partial(jax.jit, static_argnums=(0, 3))
def run(quantizer, x, scale, all_set=False):
    (q,) = once(quantizer, x, scale, all_set, ROWS)
    return q


@functools.partial(jax.jit, static_argnums=0)
def run_both(quantizer, x, scale):
    return once(quantizer, x, scale, False, ROWS, COLUMNS), *(
        once(quantizer, x, scale, False, kept) for kept in (ROWS, COLUMNS)
    )


def multiplier_of(quantizer, x, stored) -> np.ndarray:
    if isinstance(quantizer, Static):
        return oracle.inverse(np.float32(quantizer.scale))
    if quantizer.stateful and stored:
        return oracle.inverse(stored)
    kept = None if granularity_of(quantizer) == fp8.PerTensor() else (0,)
    options = {"power_of_two": quantizer.power_of_two, "margin": getattr(quantizer, "margin", 0)}
    return oracle.multiplier(oracle.amax(x, kept), quantizer.value_format.name, **options)


@pytest.mark.parametrize("stored", [0.0, 1 / 3], ids=["unset", "set"])
def test_equals_oracle(name, stored):
    quantizer = QUANTIZERS[name]
    stored = np.float32(stored)
    for kind, x in hard_arrays(np.float32).items():
        q = run(quantizer, x, stored)
        if quantizer.value_format is None:
            np.testing.assert_array_equal(q, x)
            continue
        if tile_of(quantizer):
            assert_equals_oracle(q, x, tile_of(quantizer), rule_of(quantizer), kind)
            continue
        m = multiplier_of(quantizer, x, stored)
        given = (
            quantizer.scale
            if isinstance(quantizer, Static)
            else stored
            if quantizer.stateful and stored
            else None
        )
        # a scale that is given stays as it is
        scale = oracle.inverse(m) if given is None else np.float32(given)
        np.testing.assert_array_equal(np.asarray(q.scale), scale, err_msg=kind)
        np.testing.assert_array_equal(
            oracle.codes(q.values), oracle.cast(x, m, q.format.name), err_msg=kind
        )


def test_result(name):
    quantizer = QUANTIZERS[name]
    x, scale = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    q = jax.eval_shape(functools.partial(run, quantizer), x, scale)
    assert q.dtype == x.dtype
    assert q.shape == SHAPE
    if quantizer.value_format is None:
        assert isinstance(q, jax.ShapeDtypeStruct)
        return
    validate(q)
    assert q.format == quantizer.value_format
    assert q.granularity == granularity_of(quantizer)


def test_amax_is_asked_for_by_those_who_need_it(name):
    quantizer = QUANTIZERS[name]
    like = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    for all_set in (False, True):
        calls = []

        def run(x, stored, calls=calls, all_set=all_set):
            def amax(asked):
                calls.append(asked)
                return amax_of(x, asked)

            return once(quantizer, x, stored, all_set, ROWS, amax=amax)

        granularity = granularity_of(quantizer)
        jax.eval_shape(run, *like)
        # The amaxes of tiles are at hand, and never combined across devices.
        current = isinstance(quantizer, Current) and not tile_of(quantizer)
        assert calls == [granularity] * (
            current or (isinstance(quantizer, Delayed) and not all_set)
        )


def test_two_directions_in_one_call(name):
    quantizer = QUANTIZERS[name]
    for x in (hard_arrays(np.float32)["wide"], hard_arrays(np.float32)["one_nan"]):
        together, rows, columns = run_both(quantizer, x, np.float32(0.0))
        for q, (alone,), kept in zip(together, (rows, columns), (ROWS, COLUMNS), strict=True):
            if quantizer.value_format is None:
                np.testing.assert_array_equal(q, x)
                continue
            assert q.granularity == alone.granularity == granularity_of(quantizer, kept)
            np.testing.assert_array_equal(oracle.codes(q.values), oracle.codes(alone.values))
            np.testing.assert_array_equal(scale_of(q), scale_of(alone))
            if tile_of(quantizer):
                assert_equals_oracle(q, x, tile_of(quantizer, kept), rule_of(quantizer))


def test_is_a_value(name):
    quantizer = QUANTIZERS[name]
    assert isinstance(quantizer, AbstractQuantizer)
    assert dataclasses.replace(quantizer) == quantizer
    assert hash(dataclasses.replace(quantizer)) == hash(quantizer)
    assert sum(quantizer == other for other in QUANTIZERS.values()) == 1
    assert type(quantizer).__name__ in repr(quantizer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer.granularity = None
    with pytest.raises(TypeError):
        type(quantizer)(fp8.E4M3)  # keywords only


@pytest.mark.parametrize("wrong", [fp8.E8M0, None, "nonsense", -1, [1]], ids=str)
def test_every_field_is_checked(name, wrong):
    quantizer = QUANTIZERS[name]
    for field in dataclasses.fields(quantizer):
        if field.name == "scale_format" and (
            wrong is None or (wrong == fp8.E8M0 and tile_of(quantizer))
        ):
            continue  # not wrong
        with pytest.raises((TypeError, ValueError), match=re.escape(f"{field.name}={wrong!r}")):
            dataclasses.replace(quantizer, **{field.name: wrong})
