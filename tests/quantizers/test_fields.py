import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8.quantizers import Current, Delayed, Identity, Static

FORMAT = {"format": fp8.E4M3}
TILES = {**FORMAT, "granularity": fp8.PerBlock((1, 32))}


@pytest.mark.parametrize(
    ("error", "quantizer", "fields", "parts"),
    [
        (ValueError, Current, {"format": fp8.E8M0}, ("format=E8M0", "use one of [E4M3, E5M2]")),
        (ValueError, Current, {"format": "e4m3"}, ("format='e4m3'", "use one of [E4M3, E5M2]")),
        (TypeError, Current, {}, ("format",)),
        (TypeError, Current, {**FORMAT, "margin": 1}, ("margin",)),
        (TypeError, Current, {**FORMAT, "power_of_two": 1}, ("power_of_two=1", "True or False")),
        (
            ValueError,
            Current,
            {**FORMAT, "granularity": fp8.PerAxis(0)},
            ("granularity=PerAxis(0)", "use PerTensor(), PerRow() or PerBlock((1, T))"),
        ),
        (
            ValueError,
            Current,
            {**FORMAT, "granularity": None},
            ("granularity=None", "use PerTensor(), PerRow() or PerBlock("),
        ),
        *(
            (
                ValueError,
                Current,
                {**FORMAT, "granularity": fp8.PerBlock(tile)},
                (f"tile={tile}", "(1, T)", "(T, T)"),
            )
            for tile in ((128,), (128, 1), (64, 128), (1, 1, 128))
        ),
        (
            ValueError,
            Current,
            {**FORMAT, "scale_format": fp8.E8M0},
            ("scale_format=E8M0 needs tiles", "granularity=PerTensor()", "PerBlock((1, 32))"),
        ),
        (
            ValueError,
            Current,
            {**FORMAT, "scale_format": fp8.E8M0, "granularity": fp8.quantizers.PerRow()},
            ("scale_format=E8M0 needs tiles", "granularity=PerRow()"),
        ),
        (
            ValueError,
            Current,
            {**TILES, "scale_format": fp8.E4M3},
            ("scale_format=E4M3", "holds no scales"),
        ),
        (
            ValueError,
            Current,
            {**TILES, "scale_rounding": "floor"},
            ("scale_rounding='floor'", "scale_format=E8M0"),
        ),
        (
            ValueError,
            Current,
            {**TILES, "scale_format": fp8.E8M0, "scale_rounding": "ceil"},
            ("scale_rounding='ceil'", "'rceil' or 'floor'"),
        ),
        (
            TypeError,
            Delayed,
            {**FORMAT, "granularity": fp8.PerBlock((1, 128))},
            ("'granularity'",),
        ),
        (ValueError, Delayed, {"format": None}, ("format=None", "use one of [E4M3, E5M2]")),
        (ValueError, Delayed, {**FORMAT, "history_length": 0}, ("history_length=0", "at least 1")),
        (
            ValueError,
            Delayed,
            {**FORMAT, "history_length": 16.0},
            ("history_length=16.0", "integer"),
        ),
        (
            ValueError,
            Delayed,
            {**FORMAT, "history_length": True},
            ("history_length=True", "integer"),
        ),
        (
            ValueError,
            Delayed,
            {**FORMAT, "algorithm": "mean"},
            ("algorithm='mean'", "use 'max' or 'most_recent'"),
        ),
        (ValueError, Delayed, {**FORMAT, "margin": -1}, ("margin=-1", "from 0 to 64")),
        (ValueError, Delayed, {**FORMAT, "margin": 65}, ("margin=65", "from 0 to 64")),
        (ValueError, Delayed, {**FORMAT, "margin": 0.5}, ("margin=0.5", "integer")),
        (
            TypeError,
            Delayed,
            {**FORMAT, "power_of_two": None},
            ("power_of_two=None", "True or False"),
        ),
        *(
            (
                ValueError,
                Static,
                {**FORMAT, "scale": scale},
                (f"scale={scale!r}", "between 2**-126 and 2**126"),
            )
            for scale in (0.0, -1.0, np.inf, np.nan, 2.0**127, 10**400, "1", None, True)
        ),
        (
            ValueError,
            Static,
            {"format": fp8.E8M0, "scale": 1.0},
            ("format=E8M0", "use one of [E4M3, E5M2]"),
        ),
        (TypeError, Identity, FORMAT, ("format",)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:50],
)
def test_misuse(error, quantizer, fields, parts):
    with pytest.raises(error, match=mentions(*parts)):
        quantizer(**fields)


def test_a_scale_is_refused_as_an_array():
    with pytest.raises(ValueError, match=mentions("scale=Array(1.", "must be a positive number")):
        Static(format=fp8.E4M3, scale=jnp.float32(1.0))
