"""What `fp8.quantize` refuses: the argument by its name, its value, the cure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import quantized
from hard_inputs import mentions

import jaxfp8 as fp8

X = jnp.ones((2, 3))
KEY = jax.random.key(0)
TILE = fp8.PerBlock((1, 32))


@pytest.mark.parametrize(
    ("error", "arguments", "options", "parts"),
    [
        (
            TypeError,
            (jnp.ones(3, jnp.int32), fp8.E4M3),
            {},
            ("x has dtype int32", "Cast it to one of", "bfloat16"),
        ),
        (TypeError, ([1, 2], fp8.E4M3), {}, ("x has dtype int32", "Cast it to one of")),
        (TypeError, (jnp.ones(3, bool), fp8.E4M3), {}, ("x has dtype bool", "Cast it to one of")),
        (
            TypeError,
            (jnp.ones(3, jnp.complex64), fp8.E4M3),
            {},
            ("x has dtype complex64", "Cast it to one of"),
        ),
        (
            TypeError,
            (jnp.ones(3, jnp.float8_e5m2), fp8.E4M3),
            {},
            ("x has dtype float8_e5m2", "Cast it to one of"),
        ),
        (
            TypeError,
            (quantized(X), fp8.E4M3),
            {},
            ("x is of type QuantizedTensor", "x.dequantize()"),
        ),
        (ValueError, (X, fp8.E8M0), {}, ("format=E8M0", "use one of [E4M3, E5M2]")),
        (ValueError, (X, "e4m3"), {}, ("format='e4m3'", "use one of [E4M3, E5M2]")),
        (
            ValueError,
            (X, jnp.float8_e4m3fn),
            {},
            ("format=", "float8_e4m3fn", "use one of [E4M3, E5M2]"),
        ),
        (
            TypeError,
            (X, fp8.E4M3, 0),
            {},
            (
                "granularity=0",
                "Use fp8.PerTensor(), fp8.PerAxis(the axes to keep) or fp8.PerBlock(",
            ),
        ),
        (
            TypeError,
            (X, fp8.E4M3, fp8.PerTensor),
            {},
            ("granularity=", "PerTensor", "Use fp8.PerTensor()"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, fp8.quantizers.PerRow()),
            {},
            ("granularity", "PerRow()", "use PerAxis("),
        ),
        (
            ValueError,
            (X, fp8.E4M3, fp8.PerAxis(2)),
            {},
            ("granularity", "PerAxis(2)", "name each axis to keep once"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, fp8.PerAxis(0, -2)),
            {},
            ("granularity", "PerAxis(0, -2)", "named twice"),
        ),
        (TypeError, (X, fp8.E4M3, ()), {}, ("granularity=()", "fp8.PerBlock(")),
        (
            TypeError,
            (X, fp8.E4M3, (fp8.PerTensor(), 0)),
            {},
            ("granularity=(PerTensor(), 0)", "fp8.PerBlock("),
        ),
        (
            ValueError,
            (X, fp8.E4M3, fp8.PerBlock((1, 1, 32))),
            {},
            ("PerBlock(tile=(1, 1, 32))", "2 axes", "3 sides"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, (fp8.PerTensor(), fp8.PerAxis(2))),
            {},
            ("PerAxis(2)", "name each axis to keep"),
        ),
        (
            ValueError,
            (X, fp8.E4M3),
            {"scale_format": fp8.E8M0},
            ("scale_format=E8M0", "PerTensor()", "PerBlock((1, 32))"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, fp8.PerAxis(0)),
            {"scale_format": fp8.E8M0},
            ("scale_format=E8M0", "PerAxis(0)"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, (fp8.PerBlock((1, 32)), fp8.PerTensor())),
            {"scale_format": fp8.E8M0},
            ("scale_format=E8M0", "PerTensor()", "needs tiles"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, TILE),
            {"scale_format": fp8.E4M3},
            ("scale_format=E4M3", "holds no scales"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, TILE),
            {"scale_rounding": "floor"},
            ("scale_rounding='floor'", "scale_format=E8M0"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, TILE),
            {"scale_format": fp8.E8M0, "scale_rounding": "ceil"},
            ("scale_rounding='ceil'", "use 'rceil' or 'floor'"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, TILE),
            {"scale": jnp.ones((2, 1)), "scale_format": fp8.E8M0},
            ("scale_format=E8M0", "scale=", "Pass the one or the other"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, (TILE,)),
            {"scale": jnp.ones((2, 1))},
            ("a tuple of granularities", "scale="),
        ),
        (
            ValueError,
            (X, fp8.E4M3, TILE),
            {"scale": jnp.ones((2, 3))},
            ("scale has shape [2, 3]", "needs [2, 1]"),
        ),
        (
            TypeError,
            (X, fp8.E4M3),
            {"power_of_two": 1},
            ("power_of_two=1", "must be True or False"),
        ),
        (
            ValueError,
            (X, fp8.E4M3),
            {"scale": jnp.ones(3)},
            ("scale has shape [3]", "[2, 3]", "needs []"),
        ),
        (
            ValueError,
            (X, fp8.E4M3, fp8.PerAxis(0)),
            {"scale": 1.0},
            ("scale has shape []", "PerAxis(0)", "needs [2, 1]"),
        ),
        (
            ValueError,
            (X, fp8.E4M3),
            {"scale": 1.0, "power_of_two": True},
            ("power_of_two=True", "scale=", "Pass the one or the other"),
        ),
        *(
            (
                ValueError,
                (X, fp8.E4M3),
                {"scale": bad},
                (f"scale={bad}", "must be positive", "leave it out"),
            )
            for bad in (0.0, -1.0, np.inf, np.nan)
        ),
        (
            ValueError,
            (X, fp8.E4M3),
            {"rounding": "up"},
            ("rounding='up'", "use 'nearest' or 'stochastic'"),
        ),
        (
            ValueError,
            (X, fp8.E4M3),
            {"rounding": "stochastic"},
            ("rounding='stochastic'", "key=None", "needs a key="),
        ),
        (
            ValueError,
            (X, fp8.E4M3),
            {"key": KEY},
            ("rounding='nearest'", "key=given", "takes none"),
        ),
        (
            TypeError,
            (X, fp8.E4M3),
            {"kernels": "mosaic"},
            ("kernels='mosaic' is of type str", "fp8.Kernels"),
        ),
        (
            TypeError,
            (X, fp8.E4M3),
            {"kernels": fp8.Kernels},
            ("kernels=<class", "of type type", "fp8.Kernels('h200')"),
        ),
        (
            TypeError,
            (X, fp8.E4M3),
            {"kernels": fp8.plan.Timings(chip="h200", device="", versions=(), times=())},
            ("kernels=Timings(", "of type Timings", "fp8.Kernels('h200')"),
        ),
    ],
    ids=str,
)
def test_misuse(error, arguments, options, parts):
    with pytest.raises(error, match=mentions(*parts)):
        fp8.quantize(*arguments, **options)
