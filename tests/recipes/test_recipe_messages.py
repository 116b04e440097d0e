"""What is wrong with a recipe is said when it is made."""

import dataclasses
import functools

import pytest
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8.quantizers import Current, Delayed, Identity

STATIC = {"x_scale": 0.1, "w_scale": 0.2, "g_scale": 0.3}
OPERANDS = fp8.recipes.Operands(lhs=Identity(), rhs=Identity())


def in_tiles(*tile):
    return Current(format=fp8.E4M3, granularity=fp8.PerBlock(tile))


def differing_histories():
    lhs, rhs = (Delayed(format=fp8.E4M3, history_length=length) for length in (4, 8))
    return fp8.Recipe(
        name="mine", fprop=fp8.recipes.Operands(lhs=lhs, rhs=rhs), dgrad=OPERANDS, wgrad=OPERANDS
    )


E5M2 = Current(format=fp8.E5M2)


MISUSE = [
    (TypeError, lambda: fp8.recipes.delayed(granularity=fp8.quantizers.PerRow()), ("granularity",)),
    (TypeError, lambda: fp8.recipes.delayed(fp8.E4M3), ("positional",)),
    (TypeError, lambda: fp8.recipes.current(margin=1), ("margin",)),
    (TypeError, lambda: fp8.recipes.identity(forward=fp8.E4M3), ("forward",)),
    (TypeError, lambda: fp8.recipes.static(x_scale=1.0), ("w_scale", "g_scale")),
    (
        ValueError,
        lambda: fp8.recipes.static(**{**STATIC, "w_scale": 0.0}),
        ("scale=0.0", "between 2**-126 and 2**126"),
    ),
    (ValueError, lambda: fp8.recipes.delayed(history_length=0), ("history_length=0", "at least 1")),
    (
        ValueError,
        lambda: fp8.recipes.delayed(algorithm="mean"),
        ("algorithm='mean'", "'most_recent'"),
    ),
    (ValueError, lambda: fp8.recipes.delayed(margin=-1), ("margin=-1", "from 0 to 64")),
    (ValueError, lambda: fp8.recipes.delayed(forward=fp8.E8M0), ("format=E8M0", "use one of")),
    (
        TypeError,
        lambda: fp8.recipes.current(power_of_two="yes"),
        ("power_of_two='yes'", "True or False"),
    ),
    (
        TypeError,
        lambda: fp8.recipes.rowwise(high_precision_wgrad=1),
        ("high_precision_wgrad=1", "True or False"),
    ),
    (
        ValueError,
        lambda: fp8.recipes.current(forward=fp8.E5M2),
        ("lhs and rhs", "E5M2", "give one of them E4M3"),
    ),
    (
        ValueError,
        lambda: fp8.recipes.Operands(lhs=E5M2, rhs=E5M2),
        ("lhs and rhs", "E5M2", "give one of them E4M3"),
    ),
    (
        TypeError,
        lambda: fp8.recipes.Operands(lhs=fp8.E4M3, rhs=E5M2),
        ("lhs=E4M3", "quantizer of fp8.quantizers"),
    ),
    (
        TypeError,
        lambda: fp8.recipes.Operands(lhs=E5M2, rhs=None),
        ("rhs=None", "Identity() for none"),
    ),
    (
        TypeError,
        lambda: fp8.Recipe(name="a", fprop=OPERANDS, dgrad=OPERANDS, wgrad=None),
        ("wgrad=None", "Operands(lhs="),
    ),
    (
        TypeError,
        lambda: fp8.Recipe(name=3, fprop=OPERANDS, dgrad=OPERANDS, wgrad=OPERANDS),
        ("name=3", "must be a string"),
    ),
    (
        ValueError,
        differing_histories,
        ("history_length", "[4, 8]", "give all quantizers with state the same"),
    ),
    *(
        (
            ValueError,
            functools.partial(fp8.recipes.blockwise, **fields),
            ("takes one operand in 2D tiles", "give 2 to one"),
        )
        for fields in (
            {"x_tile_dim": 2},
            {"g_tile_dim": 2},
            {"x_tile_dim": 2, "w_tile_dim": 1, "g_tile_dim": 2},
        )
    ),
    (
        ValueError,
        lambda: fp8.recipes.blockwise(forward=fp8.E5M2),
        ("lhs and rhs", "E5M2", "give one of them E4M3"),
    ),
    (
        ValueError,
        lambda: fp8.recipes.blockwise(forward=fp8.E5M2, gradient=fp8.E5M2),
        ("lhs and rhs", "E5M2", "give one of them E4M3"),
    ),
    *(
        (
            ValueError,
            functools.partial(fp8.recipes.blockwise, **{name: wrong}),
            (f"{name}={wrong!r}", "1 (1x128)", "2 (128x"),
        )
        for name in ("x_tile_dim", "w_tile_dim", "g_tile_dim")
        for wrong in (0, 3, True, None, "2", (1, 128))
    ),
    *(
        (
            ValueError,
            functools.partial(fp8.recipes.mxfp8, w_tile_dim=wrong),
            (f"w_tile_dim={wrong!r}", "1 (1x32)", "2 (32x"),
        )
        for wrong in (0, 32, False)
    ),
    (
        ValueError,
        lambda: fp8.recipes.mxfp8(scale_rounding="ceil"),
        ("scale_rounding='ceil'", "'rceil' or 'floor'"),
    ),
    (TypeError, lambda: fp8.recipes.mxfp8(power_of_two=True), ("power_of_two",)),
    (TypeError, lambda: fp8.recipes.blockwise(power_of_two=1), ("power_of_two=1", "True or False")),
    (TypeError, lambda: fp8.recipes.blockwise(scale_rounding="rceil"), ("scale_rounding",)),
    # The chip is an argument of `fp8.Kernels`.
    *(
        (TypeError, functools.partial(preset, chip="b200"), ("unexpected keyword", "'chip'"))
        for preset in (fp8.recipes.blockwise, fp8.recipes.mxfp8)
    ),
    (
        TypeError,
        lambda: dataclasses.replace(fp8.recipes.current(), chip="b200"),
        ("unexpected keyword", "'chip'"),
    ),
    *(
        (
            TypeError,
            functools.partial(fp8.recipes.get, name, chip="b200"),
            (f"{name!r}", "['chip']"),
        )
        for name in ("current", "blockwise", "mxfp8")
    ),
    (
        ValueError,
        lambda: fp8.recipes.Operands(lhs=in_tiles(1, 128), rhs=in_tiles(1, 32)),
        ("lhs has tiles of 128", "rhs of 32", "both sides need the same"),
    ),
    (
        ValueError,
        lambda: fp8.recipes.Operands(lhs=in_tiles(32, 32), rhs=in_tiles(32, 32)),
        ("both in 2D", "PerBlock((1, 32))"),
    ),
    (ValueError, lambda: fp8.recipes.get("fp8"), ("'fp8'", "use one of", "'delayed'")),
    (
        TypeError,
        lambda: fp8.recipes.get("current", margin=1),
        ("'current'", "['margin']", "'power_of_two'"),
    ),
    (TypeError, lambda: fp8.init_state("delayed"), ("recipe='delayed'", "fp8.recipes.delayed()")),
    (
        TypeError,
        lambda: fp8.Kernels("h200").compiler_options("delayed"),
        ("recipe='delayed'", "fp8.recipes.delayed()"),
    ),
    (
        ValueError,
        lambda: fp8.Kernels("h300").compiler_options(fp8.recipes.delayed()),
        ("chip='h300'", "'h200'"),
    ),
    (
        ValueError,
        lambda: fp8.Kernels().compiler_options(fp8.recipes.delayed()),
        ("Kernels()", "names no chip", 'fp8.Kernels("h200")'),
    ),
]


@pytest.mark.parametrize(("error", "build", "parts"), MISUSE, ids=range(len(MISUSE)))
def test_misuse(error, build, parts):
    with pytest.raises(error, match=mentions(*parts)):
        build()
