"""`save_original`: the same bits, with other residuals."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import FP8Dense, FP8DenseGeneral, FP8DotGeneral, FP8Einsum
from jaxfp8.sharding import Shard

RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "current": fp8.recipes.current(),
    "rowwise_hp_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8_2d": fp8.recipes.mxfp8(w_tile_dim=2),
    "static": fp8.recipes.static(x_scale=0.125, w_scale=0.125, g_scale=0.125),
}
CHOICES = [("x",), ("w",), ("x", "w")]
M, K, N = 24, 160, 48
F8, BF16 = "float8_e4m3fn", "bfloat16"


def rows(*few):
    return [pytest.param(n, marks=() if n in few else pytest.mark.slow) for n in RECIPES]


def normal(i, *shape, dtype=BF16):
    """Of NumPy: of jax.random each shape and dtype is a program."""
    return jnp.asarray(np.random.default_rng(i).standard_normal(shape).astype(jnp.dtype(dtype)))


X, W, C = normal(0, M, K), normal(1, K, N), normal(2, M, N)


def layer(recipe, x, w, state, **options):
    return fp8.dot(x, w, recipe=recipe, state=state if recipe.rows else None, **options)


def step(layer, x, w, state):
    """y, gradients and next state."""

    def loss(params, state):
        y = layer(*params, state)
        return jnp.sum((y * C).astype(jnp.float32)), y

    (_, y), *rest = fp8.value_and_grad(loss, has_aux=True)((x, w), state)
    return y, *rest


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("delayed", CHOICES[:2]),
        ("blockwise", CHOICES[2:]),
        *(pytest.param(name, CHOICES, marks=pytest.mark.slow) for name in RECIPES),
    ],
    ids=str,
)
def test_same_bits(name, choices):
    recipe, state = RECIPES[name], fp8.init_state(RECIPES[name])

    def steps(choice):
        run = functools.partial(step, functools.partial(layer, recipe, save_original=choice))
        first = run(X, W, state)
        return first, run(2 * X, W, first[2]) if recipe.rows else ()

    want, *got = (jax.jit(steps, static_argnums=0)(choice) for choice in (None, *choices))
    for each in got:
        assert_same_bits(each, want)


def saved(function, *arrays):
    """The residuals as large as x or w, in the order of their names."""
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *arrays))
    sizes = {M * K: "x", K * N: "w"}
    return sorted(f"{sizes[leaf.size]} {leaf.dtype}" for leaf in kept if leaf.size in sizes)


@pytest.mark.parametrize("name", [n for n in RECIPES if not RECIPES[n].rows])
def test_residuals(name):
    """One array for each tensor: the tensor itself, or its FP8 copy."""
    recipe = RECIPES[name]
    x = BF16 if name == "rowwise_hp_wgrad" else F8
    for choice in (None, *CHOICES):
        dot = functools.partial(layer, recipe, save_original=choice)
        assert saved(lambda x, w, dot=dot: dot(x, w, None), X, W) == [
            f"w {BF16 if 'w' in (choice or ()) else F8}",
            f"x {BF16 if 'x' in (choice or ()) else x}",
        ]


@pytest.mark.parametrize("name", ["current", "blockwise"])
def test_the_backward_pass_reads_no_other_array(name):
    """Without the option, neither x nor w in high precision is an input of the backward pass.

    The function that makes x needs no x for its gradient.
    """
    read = {}
    for choice in (None, ("x",), ("w",)):
        dot = functools.partial(layer, RECIPES[name], save_original=choice)
        forward = lambda x, w, dot=dot: jax.vjp(lambda x, w: dot(2 * x, 2 * w, None), x, w)
        y, pull = jax.eval_shape(forward, X, W)
        program = jax.make_jaxpr(lambda pull, g: pull(g))(pull, y).jaxpr
        used = {var for e in program.eqns for var in e.invars if not hasattr(var, "val")}
        inputs = [var.aval for var in program.invars if var in used]
        read[choice] = {
            tensor: aval.dtype.name
            for aval in inputs
            for tensor, array in (("x", X), ("w", W))
            if aval.shape == array.shape
        }
    assert read == {
        None: {"x": F8, "w": F8}, ("x",): {"x": BF16, "w": F8}, ("w",): {"x": F8, "w": BF16},
    }  # fmt: skip


PROLOGUES = {
    "swiglu": (fp8.prologues.SwiGLU(), (X, normal(3, M, K))),
    "rms_norm": (fp8.prologues.RMSNorm(), (X, 1 + normal(4, K, dtype="float32"))),
}


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["swiglu", pytest.param("rms_norm", marks=pytest.mark.slow)])
def test_prologues(name, recipe):
    prologue, arrays = PROLOGUES[name]
    recipe, state = RECIPES[recipe], fp8.init_state(RECIPES[recipe])
    run = lambda choice, arrays: step(
        functools.partial(layer, recipe, save_original=choice, prologue=prologue), arrays, W, state
    )
    run = jax.jit(run, static_argnums=0)
    assert_same_bits(run(("x",), arrays), run(None, arrays))


@pytest.mark.parametrize("name", PROLOGUES)
def test_residuals_of_prologues(name):
    """The arrays of the prologue are saved, which its own gradient needs as well."""
    prologue, arrays = PROLOGUES[name]
    # SwiGLU keeps both arrays for its gradient, RMSNorm its x; the copy in FP8 is on top.
    kept = {
        choice: saved(
            lambda *arrays, choice=choice: fp8.dot(
                arrays, W, recipe=RECIPES["current"], prologue=prologue, save_original=choice
            ),
            *arrays,
        )
        for choice in (None, ("x",))
    }
    of_x = lambda dtype, choice: kept[choice].count(f"x {dtype}")
    assert of_x(F8, None) == 1
    assert of_x(F8, ("x",)) == 0
    assert of_x(BF16, ("x",)) >= of_x(BF16, None) >= 1


def stacked(wrap, choice, recipe, ws, state, x):
    """Layers under a scan, each wrapped."""
    one = wrap(functools.partial(layer, recipe, save_original=choice))

    def body(x, own):
        w, state = own
        return jnp.tanh(one(x, w, state)), None

    def loss(params, state):
        y, _ = lax.scan(body, params[1], (params[0], state if recipe.rows else None))
        return jnp.sum(y.astype(jnp.float32))

    return fp8.value_and_grad(loss)((ws, x), state)


WRAPS = {
    "scan": lambda f: f,
    "remat": jax.checkpoint,
    "policy": functools.partial(jax.checkpoint, policy=fp8.save_fp8_residuals()),
    "no inputs": functools.partial(jax.checkpoint, policy=fp8.save_fp8_residuals(inputs=False)),
}


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(n, marks=pytest.mark.slow if n in ("scan", "remat") else ()) for n in WRAPS],
)
@pytest.mark.parametrize("name", rows("delayed"))
def test_scan_and_remat(name, wrap):
    recipe, layers = RECIPES[name], 2
    state = jax.tree.map(lambda a: jnp.stack([a] * layers), fp8.init_state(recipe))
    run = jax.jit(functools.partial(stacked, WRAPS[wrap]), static_argnums=(0, 1))
    arrays = recipe, normal(1, layers, 32, 32) / 4, state, normal(0, M, 32)
    assert_same_bits(run(("x", "w"), *arrays), run(None, *arrays))


def test_a_scan_saves_w_once():
    """w of all layers is an argument. With the option, a scan stacks no copies of it."""
    sizes = {}
    for choice in (None, ("w",)):

        def loss(ws, choice=choice):
            body = lambda x, w: (
                jnp.tanh(layer(RECIPES["current"], x, w, None, save_original=choice)), None,
            )  # fmt: skip
            return jnp.sum(lax.scan(body, normal(0, M, 32), ws)[0])

        kept = jax.tree.leaves(
            jax.eval_shape(lambda ws: jax.vjp(loss, ws)[1], normal(1, 5, 32, 32))
        )
        sizes[choice] = sorted(str(leaf.dtype) for leaf in kept if leaf.shape == (5, 32, 32))
    assert sizes == {None: [F8], ("w",): [BF16]}


@pytest.mark.parametrize("name", rows("rowwise"))
def test_shards(name):
    """x and w are split along the contracted axis, and gathered in FP8 in both passes."""
    recipe, state = RECIPES[name], fp8.init_state(RECIPES[name])
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, c = normal(0, 256, 256), normal(1, 256, 64), normal(2, 256, 64)

    def run(choice):
        def local(x, w, c, state):
            def loss(params, state):
                y = layer(
                    recipe, *params, state, save_original=choice,
                    x_shard=Shard(0, "fsdp"), w_shard=Shard(0, "fsdp"),
                )  # fmt: skip
                part = lax.axis_index("fsdp")
                y = lax.dynamic_slice_in_dim(y, 128 * part, 128)
                return lax.psum(jnp.sum((y * c).astype(jnp.float32)), "fsdp")

            return fp8.value_and_grad(loss)((x, w), state)[1:]

        split = P("fsdp")
        return jax.jit(
            jax.shard_map(
                local, mesh=mesh, in_specs=(split, split, split, P()),
                out_specs=((split, split), P()),
            )
        )(x, w, c, state)  # fmt: skip

    want = run(None)
    assert_same_bits(run(("x", "w")), want)
    assert all(jnp.any(each != 0) for each in want[0])


def test_every_cast_is_watched():
    """`diagnostics.collect` also finds the casts of the backward pass."""
    found = {}
    for choice in (None, ("x", "w")):
        one = jax.jit(
            jax.grad(
                lambda x, w, choice=choice: jnp.sum(
                    layer(RECIPES["mxfp8"], x, w, None, save_original=choice, name="up")
                ),
                argnums=(0, 1),
            )
        )
        with fp8.diagnostics.collect() as records:
            one(X, W)
        found[choice] = fp8.diagnostics.summary(records).rows
    assert len(found[None]) == 6
    assert found["x", "w"] == found[None]


class Net(nn.Module):
    choice: tuple[str, ...] | None

    @nn.compact
    def __call__(self, x):
        how = {"recipe": RECIPES["current"], "save_original": self.choice}
        x = FP8Dense(32, **how)(x)
        x = FP8DenseGeneral((2, 16), **how)(x)
        x = FP8Einsum((2, 16, 8), "bhd,hdk->bk", use_bias=False, **how)(x)
        return nn.Dense(8, dot_general_cls=FP8DotGeneral.using(**how))(x)


class Nnx(nnx.Module):
    def __init__(self, choice):
        how = {"recipe": RECIPES["current"], "save_original": choice, "rngs": nnx.Rngs(0)}
        self.layers = nnx.List([
            fp8.nnx.FP8Linear(K, 32, **how),
            fp8.nnx.FP8LinearGeneral(32, (2, 16), **how),
            fp8.nnx.FP8Einsum("bhd,hdk->bk", (2, 16, 8), **how),
        ])  # fmt: skip

    def __call__(self, x):
        for each in self.layers:
            x = each(x)
        return x


def linen(choice):
    params = jax.eval_shape(Net(None).init, jax.random.key(0), X.astype(jnp.float32))
    return lambda x, params: Net(choice).apply(params, x), params


def of_nnx(choice):
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Nnx(choice)), nnx.Param)
    return lambda x, params: nnx.merge(graphdef, params)(x), params


@pytest.mark.parametrize("model", [linen, of_nnx])
def test_layers(model):
    """They pass the option on: other residuals, which have the same bits (see above)."""
    kept = {}
    for choice in (None, ("x",)):
        apply, params = model(choice)
        residuals = jax.eval_shape(
            lambda x, p, f=apply: jax.vjp(f, x, p)[1], X.astype(jnp.float32), params
        )
        kept[choice] = sum(
            leaf.dtype == F8 and leaf.shape[0] == M for leaf in jax.tree.leaves(residuals)
        )
    assert kept == {None: 4 if model is linen else 3, ("x",): 0}


@pytest.mark.parametrize("given", ["x", ("g",), ("x", "x", "y"), True, [1]])
def test_names(given):
    with pytest.raises((TypeError, ValueError), match="save_original=") as raised:
        layer(RECIPES["current"], X, W, None, save_original=given)
    assert '("x",)' in str(raised.value)
