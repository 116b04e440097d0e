"""What tensor cores lose of sums equals what NumPy finds, in float64, beside the model of them."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from pages import ROOT
from rich.console import Console

import jaxfp8 as fp8
from jaxfp8.diagnostics import Summary, SumRow, summary
from jaxfp8.numerics._tensor_cores import wgmma


def tiles_of(side):
    """A recipe with 1D tiles of this side."""
    quantizer = fp8.quantizers.Current(
        format=fp8.E4M3, granularity=fp8.PerBlock((1, side)), power_of_two=True
    )
    operands = fp8.recipes.Operands(lhs=quantizer, rhs=quantizer)
    return fp8.Recipe(name=f"tiles of {side}", fprop=operands, dgrad=operands, wgrad=operands)


RECIPES = {
    "current": fp8.recipes.current(),
    "delayed": fp8.recipes.delayed(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "tiles of 16": tiles_of(16),  # shorter than a step of the tensor cores
}
# The side of a tile along K, the tile of w, and the rule of scales.
TILES = {
    "blockwise": (128, (128, 128), "power_of_two"),
    "blockwise, float32": (128, (128, 128), "float32"),
    "mxfp8": (32, (1, 32), "rceil"),
    "tiles of 16": (16, (1, 16), "power_of_two"),
}
M, K, N = 96, 300, 80  # more rows and columns than a sample has; ragged steps and tiles
RNG = np.random.default_rng(0)


def array(*shape, spread=3, one_sign=False):
    x = (RNG.normal(size=shape) * np.exp2(RNG.integers(-spread, spread, shape))).astype(np.float32)
    return np.abs(x) if one_sign else x


X, W, C = array(M, K), array(K, N), array(M, N, one_sign=True)


def step(recipe, state, x, w, c, **options):
    """One step, in which c is the gradient of y."""

    def loss(arrays, state, c):
        y = fp8.dot(*arrays, recipe=recipe, state=state, name="layer", **options)
        return jnp.sum(y * c)

    return fp8.value_and_grad(loss)((x, w), state, c)


def state_of(recipe):
    return fp8.init_state(recipe) if recipe.rows else ()


def sums_of(run):
    """The rows of a run, by matmul."""
    with fp8.diagnostics.collect(sums=True) as records:
        run()
    rows = records.sums()
    assert len({row.layer for row in rows}) <= 1
    return {row.matmul: row for row in rows}


def sample(x, most=64):
    """[B, M, K] with so many of its rows, evenly spaced."""
    return x[:, np.linspace(0, x.shape[1] - 1, min(most, x.shape[1])).round().astype(int)]


@functools.cache
def tensor_cores():
    return jax.jit(jax.vmap(wgmma))


def by_cores(a, b):
    """[B, M, N] of FP8 values [B, M, S] and [B, N, S], as the model adds them."""
    a, b = (np.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % 32)]) for x in (a, b))
    return np.asarray(tensor_cores()(a, b), np.float64)


def losses(lhs, rhs, tile=None):
    """`one_sign`, `fast` and `promoted` in float64.

    Each operand is FP8 values [B, M, K], and the scale of each with a tile along K.
    """
    (lhs, of_lhs), (rhs, of_rhs) = (map(sample, operand) for operand in (lhs, rhs))
    a, b = lhs.astype(np.float64) * of_lhs, rhs.astype(np.float64) * of_rhs
    y, promoted = a @ b.mT, 0
    for start in range(0, lhs.shape[2], tile or 128):
        at = np.s_[:, :, start : start + (tile or 128)]
        part = by_cores(lhs[at], rhs[at])
        promoted += part * of_lhs[:, :, start, None] * of_rhs[:, None, :, start]
    lost = lambda z: np.linalg.norm(z - y) / np.linalg.norm(y)
    return {
        "one_sign": np.abs(y).sum() / (np.abs(a) @ np.abs(b).mT).sum(),
        "fast": np.nan if tile else lost(by_cores(lhs, rhs)),
        "promoted": lost(promoted),
        "outputs": y.size,
    }


def by_oracle(x, name, fmt, tensor):
    """FP8 values of x [M, K] that a matmul contracts along K, and the scale of each with tiles."""
    if name in TILES:
        side, of_w, rule = TILES[name]
        tile = of_w if tensor == "w" else (1, side)
        codes, scale = oracle.quantize_tiles(x, fmt, tile, rule)
        if scale.dtype == np.uint8:
            scale = np.ldexp(1.0, scale.astype(np.int64) - 127)
        scale = oracle.spread(scale.astype(np.float64), x.shape, tile)
    else:
        rows = name == "rowwise"
        codes, _ = oracle.quantize(x, fmt, (0,) if rows else None, power_of_two=rows)
        scale = np.ones(x.shape)
    return codes.view(oracle.DTYPE[fmt])[None], scale[None]


def check(row, wanted):
    found = {name: getattr(row, name) for name in wanted}
    # An error of 1e-4 of a sum, found in float32.
    assert found == pytest.approx(wanted, rel=0.01, nan_ok=True)
    assert row.one_sign == pytest.approx(wanted["one_sign"], rel=1e-5)


OPERANDS = {
    "fprop": (("x", X), ("w", W.T)),
    "dgrad": (("g", C), ("w", W)),
    "wgrad": (("x", X.T), ("g", C.T)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "delayed" else ()) for n in RECIPES],
)
def test_equals_numpy(name):
    recipe = RECIPES[name]
    rows = sums_of(lambda: jax.jit(step, static_argnums=0)(recipe, state_of(recipe), X, W, C))
    assert rows.keys() == OPERANDS.keys()
    for matmul, operands in OPERANDS.items():
        casts = getattr(recipe, matmul)
        lhs, rhs = (
            by_oracle(x, name, quantizer.value_format.name, tensor)
            for (tensor, x), quantizer in zip(operands, (casts.lhs, casts.rhs), strict=True)
        )
        wanted = losses(lhs, rhs, TILES[name][0] if name in TILES else None)
        assert wanted["promoted"] > 1e-5
        check(rows[matmul], wanted)
        assert rows[matmul].k == operands[0][1].shape[1]
        assert rows[matmul].calls == 1
        fast = matmul == "fprop" and name not in TILES
        assert rows[matmul].in_use == ("fast" if fast else "promoted")


# Letters: b batch, m n kept, k l contracted. XLA for CPUs multiplies the axes in any order.
EQUATIONS = [
    ("bmk,bkn->bmn", (12, 20, 160), (12, 160, 70)),  # more matrices than a sample has
    ("bmk,bkn->bmn", (3, 40, 160), (3, 160, 70)),
    ("mkpl,lkn->mpn", (9, 30, 11, 40), (40, 30, 7)),  # rows of two axes, and K of two
    ("k,kn->n", (300,), (300, 5)),
    ("k,k->", (300,), (300,)),
]


@pytest.mark.parametrize(
    ("equation", "of_x", "of_w"), EQUATIONS, ids=["many", "batch", "order", "vector", "two"]
)
@pytest.mark.parametrize(
    "name", ["current", pytest.param("rowwise", marks=pytest.mark.slow), "blockwise"]
)
def test_axes(equation, of_x, of_w, name):
    """Without tiles the sample is compared with NumPy. With them it must exist."""
    x, w = array(*of_x), array(*of_w)
    row = sums_of(lambda: fp8.einsum(equation, x, w, recipe=RECIPES[name], name="layer"))["fprop"]
    batch, k = of_x[0] if equation[0] == "b" else 1, 1200 if "l" in equation else of_x[-1]
    rows = 99 if "p" in equation else of_x[1] if batch > 1 else 1
    columns = of_w[-1] if "n" in equation else 1
    matrices = min(batch, 8)
    assert row.outputs == matrices * min(64 // matrices, rows) * min(columns, 64)
    assert row.k == k
    if name != "current":
        assert 0 < row.promoted < 0.01
        return
    x, w = (oracle.quantize(each, "E4M3")[0].view(oracle.DTYPE["E4M3"]) for each in (x, w))
    if "l" in equation:
        x, w = x.transpose(0, 2, 1, 3), w.transpose(2, 1, 0)
    elif w.ndim > 1:
        w = np.swapaxes(w, -1, -2)
    lhs, rhs = x.reshape(batch, -1, k), w.reshape(batch, -1, k)
    at = np.linspace(0, batch - 1, matrices).round().astype(int)
    lhs, rhs = sample(lhs[at], 64 // matrices), rhs[at]
    check(row, losses((lhs, np.ones(lhs.shape)), (rhs, np.ones(rhs.shape))))


@pytest.mark.parametrize("name", ["current", "rowwise", "blockwise"])
def test_sums_of_one_product(name):
    """The gradient of a weight that multiplies one row has no contracted axis."""
    step = jax.grad(lambda w: fp8.dot(X[0], w, recipe=RECIPES[name], name="layer").sum())
    row = sums_of(lambda: step(W))["wgrad"]
    assert (row.k, row.one_sign, row.outputs) == (1, 1.0, 64 * 64)
    assert row.promoted < 1e-3  # a product of two FP8 values has few bits


def test_frozen_weights_have_no_wgrad():
    recipe = RECIPES["current"]
    held = fp8.quantize_params({"kernel": jnp.asarray(W)}, recipe)["kernel"]
    step = jax.grad(lambda x: fp8.dot(x, held, recipe=recipe, name="layer").sum())
    assert sums_of(lambda: step(X)).keys() == {"fprop", "dgrad"}


def test_calls_of_one_name():
    """The figure of "fast" is that of fast calls: others neither hide nor mark a row."""
    x, w = jnp.abs(array(8, 4096)), jnp.abs(array(4096, 8))
    current, tiles = RECIPES["current"], RECIPES["blockwise"]

    def row(*calls):
        dot = functools.partial(fp8.dot, name="layer")
        return sums_of(lambda: [dot(x[:, :k], w[:k], **how) for k, how in calls])["fprop"]

    hidden = row((4096, {"recipe": current}), (4096, {"recipe": tiles}))
    assert (hidden.in_use, hidden.fast > 0.05) == ("fast", True)
    exact = {"recipe": current, "precision": "highest"}
    harmless = row((128, {"recipe": current}), (4096, exact))
    assert (harmless.in_use, harmless.fast < 0.01) == ("fast", True)


def test_a_sum_that_is_not_finite_is_no_tile():
    with fp8.diagnostics.collect(sums=True) as records:
        fp8.dot(jnp.asarray(X).at[0, 0].set(jnp.nan), W, recipe=RECIPES["current"], name="layer")
    line = str(fp8.diagnostics.summary(records)).splitlines()[-2]
    assert line.split()[4:6] == ["nan", "nan"]


LONG = 4096


def of_long(positive, **how):
    """The summary of a matmul with K = 4096. A share of x is positive, and so is all of w."""
    x, w = array(4, LONG, one_sign=True), array(LONG, 4, one_sign=True)
    x *= np.where(np.random.default_rng(1).random(x.shape) < positive, 1, -1)
    how = {"recipe": RECIPES["current"], "name": "layer"} | how
    with fp8.diagnostics.collect(sums=True) as records:
        fp8.dot(x.astype(np.float32), w, **how)
    return summary(records)


def test_one_sign_loses_most():
    (same,), (mixed,) = of_long(1.0).sums, of_long(0.5).sums
    assert same.one_sign == 1
    assert mixed.one_sign < 0.05
    assert same.fast > 0.02 > 0.01 > mixed.fast > 1e-4
    assert max(same.promoted, mixed.promoted) < 2e-3
    assert same.fast > 10 * mixed.fast


def test_marks():
    """The limit of docs/diagnostics.md, 1 % lost by the accumulation that runs."""
    lines = {name: str(of_long(1.0, **how)).splitlines()[-2:] for name, how in {
        "fast": {}, "precise": {"precision": "highest"},
        "tiles": {"recipe": RECIPES["blockwise"]},
    }.items()}  # fmt: skip
    assert [name for name, (row, _) in lines.items() if "!" in row] == ["fast"]
    assert lines["precise"][0].split()[-3:] == ["promoted", "16", "1"]
    assert lines["tiles"][0].split()[4] == "-"
    note = "act above 1 % lost by the accumulation in use (marked !)"
    assert {note} == {note for _, note in lines.values()}
    assert note in (ROOT / "docs" / "diagnostics.md").read_text()
    row = of_long(1.0).sums[0]
    marked = lambda **how: "!" in str(Summary((), (SumRow(**(vars(row) | how)),))).splitlines()[-2]
    assert not marked(fast=0.01)
    assert marked(fast=0.0101)
    assert not marked(fast=0.9, in_use="promoted")
    assert marked(promoted=0.0101, in_use="promoted")


def test_tables_and_dict():
    found = of_long(1.0)
    casts, sums = str(found).split("\n\n")
    assert casts.startswith("layer  tensor")
    assert sums.startswith("layer  matmul")
    out = io.StringIO()
    Console(file=out, width=200).print(found)
    assert "tensor" in out.getvalue()
    assert "one sign" in out.getvalue()
    (row,), plain = found.sums, found.as_dict()
    figures = ("k", "one_sign", "fast", "promoted", "outputs", "calls")
    assert {f"layer/fprop/{f}": getattr(row, f) for f in figures} == {
        key: value for key, value in plain.items() if "/fprop/" in key
    }
    assert len(plain) == len(figures) + sum(key.startswith(("layer/x", "layer/w")) for key in plain)
    with fp8.diagnostics.collect() as records:
        fp8.dot(X, W, recipe=RECIPES["current"])
    assert records.sums() == []
    assert summary(records).sums == ()


LAYERS = 3


@pytest.mark.parametrize("remat", [False, True])
def test_once_in_each_iteration(remat):
    def body(x, w):
        return fp8.dot(x, w, recipe=RECIPES["rowwise"], name="layer"), None

    x, ws = array(16, 32), array(LAYERS, 32, 32)
    body = jax.checkpoint(body) if remat else body
    rows = sums_of(lambda: jax.grad(lambda ws: lax.scan(body, x, ws)[0].sum())(ws))
    assert {matmul: (row.calls, row.outputs) for matmul, row in rows.items()} == {
        "fprop": (LAYERS, LAYERS * 16 * 32),
        "dgrad": (LAYERS, LAYERS * 16 * 32),
        "wgrad": (LAYERS, LAYERS * 32 * 32),
    }


def test_the_largest_of_all_calls():
    w = array(32, 8)
    xs = [array(16, 32), array(16, 32, one_sign=True)]
    dot = lambda x, name: fp8.dot(x, np.abs(w), recipe=RECIPES["current"], name=name)
    alone = [sums_of(lambda x=x: dot(x, "layer"))["fprop"] for x in xs]
    both = sums_of(lambda: [dot(x, "layer") for x in xs])["fprop"]
    for figure in ("one_sign", "fast", "promoted"):
        found = [getattr(row, figure) for row in alone]
        assert found[0] != found[1]
        assert getattr(both, figure) == max(found)
    assert both.calls == 2


def test_order_of_rows():
    with fp8.diagnostics.collect(sums=True) as records:
        for name in ("b10", "b2"):
            dot = lambda w, name=name: fp8.dot(X, w, recipe=RECIPES["current"], name=name)
            jax.grad(lambda w, dot=dot: dot(w).sum())(W)
    backwards = fp8.diagnostics.Records()
    for layer, statistics in reversed(records._records):
        backwards.receive(layer, statistics[::-1])
    for each in (records, backwards):
        rows = [(row.layer, row.matmul) for row in each.sums()]
        assert rows == [(layer, matmul) for layer in ("b2", "b10") for matmul in OPERANDS]


def test_vmap():
    w = array(5, 32, 8)
    run = jax.grad(
        lambda w: jax.vmap(
            lambda w: fp8.dot(X[:, :32], w, recipe=RECIPES["current"], name="layer")
        )(w).sum()
    )
    rows = sums_of(lambda: run(w))
    assert {row.calls for row in rows.values()} == {5}
    assert rows.keys() == OPERANDS.keys()


def test_what_has_no_sums():
    """Matmuls in high precision, and those of experts, whose casts are recorded all the same."""
    how = {"recipe": fp8.recipes.rowwise(high_precision_wgrad=True), "name": "layer"}
    rows = sums_of(lambda: jax.grad(lambda w: fp8.dot(X, w, **how).sum())(W))
    assert rows.keys() == {"fprop", "dgrad"}
    with fp8.diagnostics.collect(sums=True) as records:
        how = {"recipe": RECIPES["current"], "name": "experts"}
        jax.grad(lambda w: fp8.ragged_dot(X, w, np.array([40, 56]), **how).sum())(jnp.stack([W, W]))
    assert records.sums() == []
    assert {row.tensor for row in records.rows()} == {"x", "w", "g"}
    rows = sums_of(lambda: fp8.dot(X[:0], W, recipe=RECIPES["current"], name="layer"))
    assert rows == {}


def test_zeros_and_what_is_not_finite():
    dot = lambda x: sums_of(lambda: fp8.dot(x, W, recipe=RECIPES["rowwise"], name="layer"))["fprop"]
    zeros = dot(np.zeros_like(X))
    assert (zeros.one_sign, zeros.fast, zeros.promoted) == (0, 0, 0)
    bad = X.copy()
    bad[0, 0] = np.nan
    row = dot(bad)
    assert np.isnan([row.one_sign, row.fast, row.promoted]).all()
    # The squares of tiny and of huge sums stay in the range of float32.
    g, b = RECIPES["blockwise"], array(4, 256)
    wanted = sums_of(lambda: fp8.dot(b, b.T, recipe=g, name="layer"))["fprop"]
    for power in (-80, 80):
        small = b * np.float32(2.0**power)
        found = sums_of(lambda x=small: fp8.dot(x, b.T, recipe=g, name="layer"))["fprop"]
        assert (found.one_sign, found.promoted) == (wanted.one_sign, wanted.promoted)


@pytest.mark.parametrize("name", ["rowwise", "mxfp8"])
def test_x64(name):
    dot = lambda: fp8.dot(X, W, recipe=RECIPES[name], name="layer")
    (wanted,) = sums_of(dot).values()
    with jax.enable_x64(True):
        (found,) = sums_of(dot).values()
    assert (found.one_sign, found.promoted) == (wanted.one_sign, wanted.promoted)


def test_programs():
    """Each of casts, sums and nothing has its own program, and keeps it."""
    run = jax.jit(lambda x: fp8.dot(x, W, recipe=RECIPES["current"], name="layer"))
    text = lambda: run.lower(X).as_text()
    run(X)
    plain = text()
    for number in (2, 3, 3):
        with fp8.diagnostics.collect(sums=number == 3):
            run(X)
            inside = text()
        assert run._cache_size() == number
        assert inside != plain
    with fp8.diagnostics.collect():
        run(X)
        assert text() != inside
    assert text() == plain
    assert run._cache_size() == 3


def test_misuse():
    with (
        pytest.raises(TypeError, match="sums=1 must be True or False"),
        fp8.diagnostics.collect(sums=1),
    ):
        pass
