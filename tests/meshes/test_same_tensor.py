"""A tensor of real numbers, split in any way, is the same FP8 tensor.

Values and scales as each of its two matmuls reads them.

The tensor is multiplied by the matrix 7 I, whose FP8 copy is exact in every recipe. The result is
values * scale * 7, as that matmul reads the tensor: one rounding and no sum.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from contracts.faces import RECIPES
from hard_inputs import mentions
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes.layouts import LAYOUTS, MODES, N, by_row, make_mesh

import jaxfp8 as fp8
from jaxfp8.sharding._amax import vary_as

LAYOUT = LAYOUTS["tensor and sequence"]  # the mesh of 4 ('data') x 2 ('tensor') devices
SPLIT = P("data", "tensor")
# The key is the tensor that is read, and the only one that is split both ways. Its entry has the
# specs of x, w and g, and the axes over which y, dx and dw are sums.
PLACES = {
    "x": ((SPLIT, P("tensor"), P("data")), ("tensor", None, "data")),
    "w": ((P(None, "data"), SPLIT, P(None, "tensor")), ("data", "tensor", None)),
    "g": ((P("data"), P(None, "tensor"), SPLIT), (None, "tensor", "data")),
}
PARTS = {0: 4, 1: 2}  # of the axes of that tensor


class Reading(NamedTuple):
    tensor: str
    matmul: str
    result: int  # which of y, dx and dw is 7 times the tensor,
    transposed: bool
    contracted: int  # and the axis of the tensor along which that matmul contracts


READINGS = [
    Reading("x", "fprop", 0, False, 1), Reading("x", "wgrad", 2, True, 0),
    Reading("w", "fprop", 0, False, 0), Reading("w", "dgrad", 1, True, 1),
    Reading("g", "dgrad", 1, False, 1), Reading("g", "wgrad", 2, False, 0),
]  # fmt: skip
# Rows that are split and have a scale of their own in each shard (docs/limits.md). That happens
# inside shard_map, if types do not show that other devices share the amax. Types show it if only
# one operand of the matmul is split, or if the axes are named.
OWN = {"types": [("x", "fprop"), ("w", "fprop")], "no types": [reading[:2] for reading in READINGS]}


@functools.cache
def tensor():
    """[N, N], with another size in each row and column.

    Every part has another amax than the whole.
    """
    random = np.random.default_rng(1)
    size = np.exp2(random.uniform(-3, 3, (N, 1)) + random.uniform(-3, 3, (1, N)))
    return (random.standard_normal((N, N)) * size).astype(np.float32)


def operands(name, value):
    return [value if name == each else 7 * np.eye(N, dtype=np.float32) for each in ("x", "w", "g")]


def products(recipe, x, w, g, **how):
    """y = x @ w, and dx and dw for that g."""
    state = fp8.init_state(recipe)
    dot = functools.partial(
        fp8.dot, recipe=recipe, state=fp8.freeze(state) if recipe.rows else state, **how
    )
    y, pull = jax.vjp(dot, x, w)
    return y, *pull(vary_as(g, y))


def inside(recipe, sums, *, types, named, x, w, g):
    """Of one device; what is a sum over devices is added up by the user, unless types say so."""
    results = products(recipe, x, w, g, **({"reduce_axes": ("data", "tensor")} if named else {}))
    return tuple(
        lax.psum(result, axis) if axis and not (types and i) else result
        for i, (result, axis) in enumerate(zip(results, sums, strict=True))
    )


def on_mesh(recipe, mode, name):
    specs, sums = PLACES[name]
    mesh = make_mesh(LAYOUT, mode)
    x, w, _ = specs
    y = P(x[0], *w[1:])
    step = functools.partial(
        products, recipe, **({"out_sharding": y} if mode == "explicit" else {})
    )
    if "types" in mode:
        types = mode.startswith("types")
        named = mode != "types" and (types or not by_row(recipe))
        local = functools.partial(inside, recipe, sums, types=types, named=named)
        step = jax.shard_map(
            lambda x, w, g: local(x=x, w=w, g=g),
            mesh=mesh,
            in_specs=specs,
            out_specs=(y, x, w),
            check_vma=types,
        )
    arrays = jax.device_put(
        operands(name, tensor()), [jax.NamedSharding(mesh, spec) for spec in specs]
    )
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(step)(*arrays))


@functools.cache
def jitted(recipe):
    return jax.jit(functools.partial(products, recipe))


@functools.cache
def on_one_device(recipe, name, axis=None, part=None):
    """Of the tensor, or of one of its parts along an axis with zeros elsewhere."""
    value = tensor()
    if axis is not None:
        inside = np.arange(N) * PARTS[axis] // N == part
        value = np.where(np.expand_dims(inside, 1 - axis), value, 0)
    return jitted(recipe)(*operands(name, value))


def quantizer(recipe, reading):
    matmul, is_lhs = (
        getattr(recipe, reading.matmul),
        reading[:2] in (("x", "fprop"), ("g", "dgrad"), ("x", "wgrad")),
    )
    return matmul.lhs if is_lhs else matmul.rhs


def expected(recipe, mode, reading):
    if quantizer(recipe, reading).granularity == fp8.quantizers.PerRow() and reading[:2] in OWN.get(
        mode, ()
    ):
        parts = range(PARTS[reading.contracted])
        return sum(
            on_one_device(recipe, reading.tensor, reading.contracted, part)[reading.result]
            for part in parts
        )
    return on_one_device(recipe, reading.tensor)[reading.result]


# Rows, whose scales depend on the mode, and tiles.
QUICK = {*((mode, "rowwise") for mode in ("types", "types, axes", "no types"))}
QUICK |= {("explicit", "blockwise")}


REFUSED = {
    ("explicit", "blockwise_f32"): (
        ValueError,
        "an Explicit mesh splits over",
        "power_of_two=True",
    ),
    ("no types", "rowwise_hp_wgrad"): (
        fp8.FP8StateError,
        "amaxes of tensors and of rows",
        "check_vma=True",
    ),
}


def cells():
    for mode in MODES:
        for recipe in RECIPES:
            if mode.endswith(("shards", "result")) or (
                mode == "types, axes" and RECIPES[recipe].rows
            ):
                continue  # nothing is gathered or scattered here; a state says it
            # the same amaxes as others, or none
            if recipe not in ("delayed_pow2", "static", "identity"):
                quick = (mode, recipe) in QUICK
                yield pytest.param(
                    mode,
                    recipe,
                    id=f"{mode}-{recipe}",
                    marks=() if quick else (pytest.mark.slow,),
                )


@pytest.mark.parametrize(("mode", "recipe"), list(cells()))
def test_is_the_same_fp8_tensor(mode, recipe):
    refused = REFUSED.get((mode, recipe))
    recipe = RECIPES[recipe]
    for name in PLACES:
        if refused:
            with pytest.raises(refused[0], match=mentions(*refused[1:])):
                on_mesh(recipe, mode, name)
            continue
        results = on_mesh(recipe, mode, name)
        for reading in READINGS:
            if reading.tensor == name:
                got, want = results[reading.result], expected(recipe, mode, reading)
                np.testing.assert_array_equal(got, want, err_msg=str(reading))


@pytest.mark.parametrize(
    "recipe",
    [
        "rowwise",
        pytest.param("current", marks=pytest.mark.slow),
        pytest.param("mxfp8", marks=pytest.mark.slow),
    ],
)
def test_a_reading_is_the_quantized_tensor(recipe):
    """So that the readings above are values * scale, and not, say, the tensor itself."""
    for reading in READINGS:
        how = quantizer(RECIPES[recipe], reading)
        granularity = how.granularity.for_matmul((1 - reading.contracted,), 2)
        rule = {
            field: getattr(how, field)
            for field in ("power_of_two", "scale_format")
            if hasattr(how, field)
        }
        cast = functools.partial(fp8.quantize, format=how.format, granularity=granularity, **rule)
        wide = jax.jit(lambda x: cast(x).dequantize())(tensor())  # noqa: B023
        got = on_one_device(RECIPES[recipe], reading.tensor)[reading.result]
        got = got.T if reading.transposed else got
        np.testing.assert_allclose(got, 7 * np.float64(wide), rtol=2**-23, err_msg=str(reading))
