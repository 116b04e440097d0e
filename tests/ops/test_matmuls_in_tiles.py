"""The three matmuls of recipes in tiles against NumPy.

In which direction an operand is quantized, and how close they come.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8 as fp8

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def cast(v, tile, form="e4m3", scales="power of two"):
    """v [a, b] as FP8 in tiles sees it, in float64."""
    a, b = v.shape
    tile = tuple(min(side, size) for side, size in zip(tile, v.shape, strict=True))
    padded = np.pad(v, [(0, -size % side) for size, side in zip(v.shape, tile, strict=True)])
    cells = [size // side for size, side in zip(padded.shape, tile, strict=True)]
    amax = np.max(np.abs(padded).reshape(cells[0], tile[0], cells[1], tile[1]), axis=(1, 3))
    multiplier = np.float32(LARGEST[form]) / amax
    if scales != "float32":
        # rounded down: the scale is rounded up
        multiplier = np.ldexp(np.float32(0.5), np.frexp(multiplier)[1])
    if scales == "floor":  # 2^(the exponent of 448 - that of amax)
        multiplier = np.ldexp(
            np.float32(1), np.frexp(np.float32(LARGEST[form]))[1] - np.frexp(amax)[1]
        )
    over = lambda m: np.repeat(np.repeat(m, tile[0], axis=0), tile[1], axis=1)[:a, :b]
    values = np.clip(v * over(multiplier), -LARGEST[form], LARGEST[form]).astype(DTYPE[form])
    return values.astype(np.float64) * over(np.float32(1) / multiplier)


def table(T, x=1, w=2, g=1, form="e4m3", scales="power of two"):
    """How x and w are cast in fprop, g and w in dgrad, x and g in wgrad.

    Tiles run along what the matmul contracts.
    """
    tile = lambda dim, axis: (T, T) if dim == 2 else (1, T) if axis == 1 else (T, 1)
    of = lambda dim, axis, form="e4m3": lambda v: cast(v, tile(dim, axis), form, scales)
    return (of(x, 1), of(w, 0)), (of(g, 1, form), of(w, 1)), (of(x, 0), of(g, 0, form))


RECIPES = {
    "blockwise": (fp8.recipes.blockwise(), table(128)),
    "float32 scales": (fp8.recipes.blockwise(power_of_two=False), table(128, scales="float32")),
    "hybrid": (fp8.recipes.blockwise(gradient=fp8.E5M2), table(128, form="e5m2")),
    "hybrid, float32 scales": (
        fp8.recipes.blockwise(gradient=fp8.E5M2, power_of_two=False),
        table(128, form="e5m2", scales="float32"),
    ),
    "1D weights": (fp8.recipes.blockwise(w_tile_dim=1), table(128, w=1)),
    "2D activations": (fp8.recipes.blockwise(x_tile_dim=2, w_tile_dim=1), table(128, x=2, w=1)),
    "2D gradients": (fp8.recipes.blockwise(g_tile_dim=2, w_tile_dim=1), table(128, g=2, w=1)),
    "mxfp8": (fp8.recipes.mxfp8(), table(32, w=1)),
    "mxfp8, 2D weights": (fp8.recipes.mxfp8(w_tile_dim=2), table(32)),
    "mxfp8, floor": (fp8.recipes.mxfp8(scale_rounding="floor"), table(32, w=1, scales="floor")),
}


def some(names, fast):
    """All names, those slow that are not `fast`."""
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def gaussian(M, K, N, seed=0):
    random = np.random.default_rng(seed)
    return [random.standard_normal(size, np.float32) for size in ((M, K), (K, N), (M, N))]


def layer(recipe, x, w, g, kernels=None):
    """y, dx and dw of a compiled layer whose output gradient is g."""

    def loss(operands, state, g):  # g is an argument: XLA would fold a constant, and take its time
        y = fp8.dot(*operands, recipe=recipe, state=state, kernels=kernels)
        return jnp.sum(y * g), y

    x, w, g = map(jnp.asarray, (x, w, g))
    (_, y), (dx, dw), _ = jax.jit(fp8.value_and_grad(loss, has_aux=True))(
        (x, w), fp8.init_state(recipe), g
    )
    return {"y": y, "dx": dx, "dw": dw}


def products(x, w, g, casts=None):
    """The same in float64, of operands cast by `casts`."""
    (a, b), (c, d), (e, f) = casts or (((lambda v: v.astype(np.float64)),) * 2,) * 3
    return {"y": a(x) @ b(w), "dx": c(g) @ d(w).T, "dw": e(x).T @ f(g)}


def decibels(got, want):
    want = np.asarray(want, np.float64)
    return 20 * np.log10(np.linalg.norm(want) / np.linalg.norm(np.asarray(got, np.float64) - want))


@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_for_a_chip(chip):
    """On the CPU the program for a chip has the bits of the portable one."""
    recipe, _ = RECIPES["mxfp8, 2D weights"]
    by_name = fp8.Kernels("b200", casts="xla", matmuls="cudnn")
    arrays, kernels = gaussian(150, 200, 300), fp8.Kernels("h200") if chip == "h200" else by_name
    mine, theirs = layer(recipe, *arrays, kernels=kernels), layer(recipe, *arrays)
    for name in theirs:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


@pytest.mark.parametrize(
    "shape",
    [(150, 200, 300), pytest.param((20, 24, 28), marks=pytest.mark.slow)],
    ids=["ragged tiles", "shorter than a tile"],
)
@pytest.mark.parametrize(
    "recipe", some(RECIPES, ("blockwise", "hybrid, float32 scales", "mxfp8, 2D weights"))
)
def test_against_numpy(recipe, shape):
    recipe, casts = RECIPES[recipe]
    operands = gaussian(*shape)
    sizes = [
        2.0 ** (np.arange(t.shape[0])[:, None] % 7 - np.arange(t.shape[1])[None] % 5)
        for t in operands
    ]
    # A tile is not its neighbour.
    operands = [(t * size).astype(np.float32) for t, size in zip(operands, sizes, strict=True)]
    got, want = layer(recipe, *operands), products(*operands, casts)
    for tensor in got:
        error = np.linalg.norm(got[tensor] - want[tensor]) / np.linalg.norm(want[tensor])
        assert error < 2e-6, f"{tensor}: {error}"


# The least signal to noise of y, dx and dw, in decibels, on Gaussian data: a lost bit of the
# significand costs 6.
MARKS = {
    "blockwise": (28, 27),
    "float32 scales": (28, 27),
    "hybrid": (28, 24),
    "mxfp8": (28, 27),
    "mxfp8, 2D weights": (28, 27),
}


@pytest.mark.parametrize("recipe", some(MARKS, ("hybrid",)))
def test_signal_to_noise(recipe):
    operands = gaussian(256, 384, 320)
    got, want = layer(RECIPES[recipe][0], *operands), products(*operands)
    found = {tensor: decibels(got[tensor], want[tensor]) for tensor in got}
    forward, backward = MARKS[recipe]
    assert found["y"] >= forward, found
    assert min(found["dx"], found["dw"]) >= backward, found


@pytest.mark.parametrize("name", [*some(MARKS, ("mxfp8",)), "current"])
def test_an_outlier_row_spoils_no_other(name):
    """But with one scale for all of them it drowns every other."""
    recipe = fp8.recipes.current() if name == "current" else RECIPES[name][0]
    x, w, g = gaussian(256, 384, 320)
    x[100] *= 1e6
    others = np.arange(256) != 100
    found = decibels(layer(recipe, x, w, g)["y"][others], products(x, w, g)["y"][others])
    assert found <= 10 if name == "current" else found >= 28
