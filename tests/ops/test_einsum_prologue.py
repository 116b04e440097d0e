"""`fp8.einsum(prologue=)`: the bits and gradients of `fp8.einsum` of what the prologue makes."""

import functools

import jax
import jax.numpy as jnp
import messages
import numpy as np
import prologue_cases
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from messages import Message
from prologue_cases import (
    RECIPES,
    RMS_NORM,
    SWIGLU,
    B,
    D,
    F,
    S,
    casts_of_x,
)
from same_bits import assert_same_bits

import jaxfp8 as fp8

arrays_of = functools.cache(prologue_cases.arrays_of)

# with the shape of the right operand
EQUATIONS = {
    "bsd,df->bsf": (D, F),
    "bsd,df->fsb": (D, F),
    "...d,df": (D, F),
    "bsd,sdf->bsf": (S, D, F),
    "bsd,bsf->df": (B, S, F),  # contracts tokens; the norm is over an axis that stays
    "bsd,dfz->bsf": (D, F, 3),  # rhs is summed alone
}


def normal(seed, shape):
    """Of NumPy: of jax.random each shape is a program."""
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16)


def einsum(equation, recipe, prologue, arrays, w, state, *, fused):
    if fused:
        return fp8.einsum(equation, arrays, w, recipe=recipe, state=state, prologue=prologue)
    return fp8.einsum(equation, prologue(*arrays), w, recipe=recipe, state=state)


def stepping(call):
    """A step by `call`, one program however often it runs."""

    def loss(given, state):
        y = call(*given, state)
        return jnp.sum((y * normal(8, y.shape)).astype(jnp.float32)), y

    return jax.jit(fp8.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(
    ("equation", "recipe", "prologue"),
    [
        ("bsd,df->bsf", "delayed", SWIGLU),
        # On a mesh, and under transformations, others have a transposed result.
        pytest.param("bsd,df->fsb", "blockwise", RMS_NORM, marks=pytest.mark.slow),
        ("...d,df", "identity", SWIGLU),
        ("bsd,sdf->bsf", "current", RMS_NORM),
        ("bsd,bsf->df", "blockwise", RMS_NORM),
        pytest.param("bsd,bsf->df", "identity", RMS_NORM, marks=pytest.mark.slow),
        ("bsd,dfz->bsf", "current", SWIGLU),
    ],
)
def test_same_bits(equation, recipe, prologue):
    recipe, arrays = RECIPES[recipe], arrays_of(prologue)
    w = normal(1, EQUATIONS[equation])
    state = fp8.init_state(recipe)
    fused, apart = (
        stepping(functools.partial(einsum, equation, recipe, prologue, fused=fused))
        for fused in (True, False)
    )
    with casts_of_x() as seen:  # while it is traced
        mine = fused((arrays, w), state)
    assert set(seen) == (set() if recipe.is_identity else {prologue})
    assert_same_bits(mine, apart((arrays, w), state))
    if recipe.rows:  # the second step finds its scales set
        state = mine[2]
        assert_same_bits(fused((arrays, w), state), apart((arrays, w), state))
    if equation == "bsd,df->bsf":
        dot = lambda arrays, w, state: fp8.dot(
            arrays, w, recipe=recipe, state=state, prologue=prologue
        )
        assert_same_bits(stepping(dot)((arrays, w), state), fused((arrays, w), state))


def of_experts(call):
    return lambda arrays, w, state: jax.vmap(call, in_axes=((0, None), None, None))(
        arrays, w, state
    )


def of_layers(call):
    """scan over remat, residuals in FP8 kept."""
    again = jax.checkpoint(call, policy=fp8.save_fp8_residuals())

    def run(arrays, w, state):
        layer = lambda carry, x: (carry, again((x, arrays[1]), w, state))
        return jax.lax.scan(layer, None, arrays[0])[1]

    return run


@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("transformed", [of_experts, of_layers])
def test_transformations(transformed, recipe):
    recipe, arrays = RECIPES[recipe], arrays_of(RMS_NORM)
    w = normal(1, (D, F))
    state = fp8.init_state(recipe)
    one, two = (
        stepping(
            transformed(functools.partial(einsum, "sd,df->fs", recipe, RMS_NORM, fused=fused))
        )((arrays, w), state)
        for fused in (True, False)
    )
    assert_same_bits(one, two)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh(kind):
    """Of a batch that is split, transposed on the way out."""
    recipe, arrays = RECIPES["current"], arrays_of(SWIGLU)
    w = normal(1, (D, F))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    out = P(None, None, "d") if kind == AxisType.Explicit else None

    def call(arrays, w, *, fused):
        lhs, how = (arrays, {"prologue": SWIGLU}) if fused else (SWIGLU(*arrays), {})
        return fp8.einsum("bsd,df->fsb", lhs, w, recipe=recipe, out_sharding=out, **how)

    with jax.set_mesh(mesh):
        arrays = jax.device_put(arrays, jax.NamedSharding(mesh, P("d")))
        w = jax.device_put(w, jax.NamedSharding(mesh, P()))
        one, two = (
            jax.jit(functools.partial(call, fused=fused))(arrays, w) for fused in (True, False)
        )
    assert_same_bits(one, two)
    assert one.sharding == two.sharding


X, W = arrays_of(SWIGLU), jnp.ones((D, F), jnp.bfloat16)


def refused(equation, arrays=X, rhs=W, recipe="current", prologue=SWIGLU):
    return lambda: fp8.einsum(equation, arrays, rhs, recipe=RECIPES[recipe], prologue=prologue)


def split_norm(recipe):
    """The norm needs all of the axis that x_shard splits."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    shard = fp8.sharding.Shard(-1, "d")

    def run(x, gain, w):
        return fp8.einsum(
            "bsd,df->bsf", (x, gain), w, recipe=RECIPES[recipe], prologue=RMS_NORM, x_shard=shard
        )

    specs = (P(None, None, "d"), P("d"), P())
    with jax.set_mesh(mesh):
        return jax.shard_map(run, in_specs=specs, out_specs=P())(*arrays_of(RMS_NORM), W)


ALONE = ("occur once in it", "leave prologue= out")
MESSAGES = {
    "sum": Message(ValueError, refused("bsd,df->bf"), "index 's' of lhs", *ALONE),
    "sum, identity": Message(
        ValueError, refused("bsd,df->bf", recipe="identity"), "'bsd,df->bf'", *ALONE
    ),
    "diagonal": Message(
        ValueError,
        refused("bdd,df->bf", (X[0][:, :, :S],) * 2, W[:S]),
        "prologue=SwiGLU()",
        "index 'd' of lhs",
        ALONE[1],
    ),
    "axis of size 1": Message(
        ValueError,
        refused("bsd,bdf->bsf", tuple(x[:1] for x in X), jnp.ones((B, D, F), jnp.bfloat16)),
        "index 'b' of lhs",
        "with the same size",
        ALONE[1],
    ),
    "axis of '...'": Message(
        ValueError, refused("...d,df->f"), "an index of '...'", *ALONE
    ),
    "array": Message(
        TypeError, refused("bsd,df->bsf", X[0]), "lhs is an array bfloat16[8, 16, 40]",
        "takes 2 arrays", "Pass the tuple (gate, up)",
    ),
    "none": Message(
        TypeError, refused("bsd,df->bsf", prologue=jax.nn.silu), "prologue=<", "is no prologue",
        "apply your function to lhs",
    ),
    "tuple without": Message(
        TypeError, refused("bsd,df->bsf", prologue=None), "lhs is a tuple of 2",
        "one array is needed", "name the prologue=",
    ),
    "tuple for rhs": Message(
        TypeError, refused("bsd,df->bsf", rhs=(W, W)), "rhs is a tuple of 2",
        "one array is needed", "Pass one array",
    ),
    "shard": Message(
        ValueError, lambda: split_norm("current"), "x_shard=", "needs all of axis -1 of lhs",
        "split another",
    ),
    "shard, identity": Message(
        ValueError, lambda: split_norm("identity"), "x_shard=", "needs all of axis -1 of lhs",
        "split another",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    messages.check(MESSAGES[name])


def test_the_cure_of_a_sum():
    run = jax.jit(lambda X, W: fp8.einsum("bsd,df->bf", SWIGLU(*X), W, recipe=RECIPES["current"]))
    y = run(X, W)
    assert y.shape == (B, F)
