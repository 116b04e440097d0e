"""`prologue=` of nnx layers: the bits of the prologue before the layer, and of `fp8.dot`."""

import functools

import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from flax import nnx
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
    arrays_of,
    casts_of_x,
    cotangent,
    mistakes,
)
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.nnx import FP8DotGeneral, FP8Einsum, FP8EinsumOp, FP8Linear, FP8LinearGeneral, FP8State

SLOW = pytest.mark.slow
EQUATION = "bsd,df->bfs"
LAYERS = {
    "linear": lambda **how: FP8Linear(D, F, rngs=nnx.Rngs(0), **how),
    "einsum": lambda **how: FP8Einsum(EQUATION, (D, F), (F,), rngs=nnx.Rngs(0), **how),
}
INIT = {"bias_init": nnx.initializers.normal()}  # zeros hide mistakes


class Block(nnx.Module):
    """A layer, and the arrays of its input as parameters, so that they have gradients."""

    def __init__(self, layer, arrays, before=None):
        self.layer, self.before = layer, before
        self.arrays = nnx.List([nnx.Param(x) for x in arrays])

    def __call__(self):
        arrays = tuple(x[...] for x in self.arrays)
        return self.layer(arrays if self.before is None else self.before(*arrays))


def by_op(kind, recipe, prologue, params, state):
    """What the layer computes, written with functions."""
    kernel, bias, arrays = params
    w, bias = kernel.astype(jnp.bfloat16), bias.astype(jnp.bfloat16)
    how = {"recipe": recipe, "state": state, "prologue": prologue}
    if kind == "linear":
        return fp8.dot(arrays, w, bias=bias, **how)
    return fp8.einsum(EQUATION, arrays, w, **how) + bias.reshape(1, F, 1)


def loss_of(y):
    return jnp.sum((y * cotangent(y.shape, y.dtype)).astype(jnp.float32)), y


def compiled():
    """A step that is compiled once for each kind of block, in each test anew."""
    run = nnx.jit(fp8.nnx.value_and_grad(lambda block: loss_of(block()), has_aux=True))

    def step(block):
        """Values, gradients of kernel, bias and arrays, and the new state; the block learns."""
        values, grads = run(block)
        arrays = tuple(grads["arrays"][i] for i in range(2))
        grads = grads["layer"]["kernel"], grads["layer"]["bias"], arrays
        return values, jax.tree.leaves(grads), state_of(block)

    return step


def state_of(block):
    found = jax.tree.leaves(
        nnx.state(block, FP8State), is_leaf=lambda n: isinstance(n, fp8.state.MatmulState)
    )
    return found[0] if found else None


@pytest.mark.parametrize(
    ("kind", "recipe", "prologue"),
    [
        ("linear", "delayed", RMS_NORM),
        pytest.param("linear", "blockwise", SWIGLU, marks=SLOW),
        ("linear", "identity", SWIGLU),
        ("einsum", "current", SWIGLU),
        pytest.param("einsum", "delayed", RMS_NORM, marks=SLOW),
        pytest.param("einsum", "blockwise", RMS_NORM, marks=SLOW),
        pytest.param("einsum", "identity", RMS_NORM, marks=SLOW),
    ],
)
def test_same_bits(kind, recipe, prologue):
    recipe, arrays = RECIPES[recipe], arrays_of(prologue)
    make = functools.partial(LAYERS[kind], recipe=recipe, dtype=jnp.bfloat16, **INIT)
    mine, plain = Block(make(prologue=prologue), arrays), Block(make(), arrays, prologue)
    step = compiled()
    assert_same_bits(nnx.state(mine), nnx.state(plain))
    if recipe.rows:  # the second step finds its scales set
        step(plain)
        nnx.update(mine, nnx.state(plain))
    state = state_of(mine)
    params = mine.layer.kernel[...], mine.layer.bias[...], arrays
    with casts_of_x() as seen:
        got = step(mine)
    assert set(seen) == (set() if recipe.is_identity else {prologue})
    assert_same_bits(got, step(plain))
    op = functools.partial(by_op, kind, recipe, prologue)
    loss = lambda params, state: loss_of(op(params, state))
    run = jax.jit(fp8.value_and_grad(loss, has_aux=True))
    values, grads, new = run(params, () if state is None else state)
    assert_same_bits(got, (values, jax.tree.leaves(grads), new or None))


class MLP(nnx.Module):
    """A gated MLP. The one line that changes is that of `down`, and its call."""

    def __init__(self, fused, rngs, act=SWIGLU, recipe=None, dense=None):
        dense = dense or functools.partial(FP8Linear, recipe=recipe)
        self.gate, self.up = (dense(D, F, rngs=rngs) for _ in range(2))
        self.fused, self.act = fused, act
        prologue = fp8.prologues.SwiGLU() if fused else None
        self.down = FP8Linear(F, D, prologue=prologue, rngs=rngs, recipe=recipe)

    def __call__(self, x):
        gate, up = self.gate(x), self.up(x)
        return self.down((gate, up) if self.fused else self.act(gate, up))


class Remat(nnx.Module):
    """Only the layer with a prologue is in FP8: two more take most of the time."""

    def __init__(self, fused, rngs):
        self.mlp = MLP(fused, rngs, dense=nnx.Linear)

    def __call__(self, x):
        return nnx.remat(lambda mlp, x: mlp(x), policy=fp8.save_fp8_residuals())(self.mlp, x)


class Experts(nnx.Module):
    """vmap, of states and weights of their own."""

    def __init__(self, fused, rngs):
        make = lambda rngs: MLP(fused, rngs, recipe=RECIPES["current"])
        self.mlps = nnx.vmap(make)(rngs.split(B))

    def __call__(self, x):
        return nnx.vmap(lambda mlp, x: mlp(x))(self.mlps, x)


def mlp_step(mlp, x):
    def loss(mlp, x):
        y = mlp(x)
        return jnp.sum(jnp.square(y)), y

    values, grads = nnx.jit(fp8.nnx.value_and_grad(loss, has_aux=True))(mlp, x)
    return values, grads, nnx.state(mlp)


@pytest.mark.parametrize(
    "make", [pytest.param(MLP, marks=SLOW), Remat, pytest.param(Experts, marks=SLOW)]
)
def test_mlp(make):
    x = jax.random.normal(jax.random.key(0), (B, S, D))
    mine, plain = make(True, nnx.Rngs(0)), make(False, nnx.Rngs(0))
    assert_same_bits(nnx.state(mine), nnx.state(plain))
    got = mlp_step(mine, x)
    assert_same_bits(got, mlp_step(plain, x))
    if make is MLP:  # without a rounding in between, flax's own activation agrees
        theirs = MLP(False, nnx.Rngs(0), act=lambda gate, up: nnx.silu(gate) * up)
        y = nnx.jit(lambda mlp, x: mlp(x))(theirs, x)
        np.testing.assert_allclose(got[0][1], y, rtol=0, atol=0.1)


@nnx.jit
def call(layer, *arguments):
    return layer(*arguments)


def dtype_of(layer, arrays):
    return nnx.eval_shape(call, layer, arrays).dtype


def test_dtypes():
    """Activations are promoted as flax does it. A gain keeps its dtype, also as a Variable."""
    x, gain = arrays_of(RMS_NORM, jnp.float32)
    layer = LAYERS["linear"](recipe=RECIPES["current"], dtype=jnp.bfloat16, prologue=RMS_NORM)
    y, low = call(layer, (x, nnx.Param(gain))), x.astype(jnp.bfloat16)
    w = layer.kernel[...].astype(jnp.bfloat16)
    dot = functools.partial(fp8.dot, recipe=RECIPES["current"], prologue=RMS_NORM)
    assert_same_bits(y, jax.jit(dot)((low, gain), w))  # the bias is 0
    assert jnp.any(y != call(layer, (low, gain.astype(jnp.bfloat16))))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("kind", LAYERS)
def test_promotion(kind):
    gate, up = arrays_of(SWIGLU)
    how = {"recipe": RECIPES["current"], "param_dtype": jnp.bfloat16}
    layer, normed = (LAYERS[kind](prologue=each, **how) for each in (SWIGLU, RMS_NORM))
    wide = gate.astype(jnp.float32), up.astype(jnp.float32)
    assert dtype_of(layer, (gate, up)) == jnp.bfloat16
    assert_same_bits(call(layer, (gate, wide[1])), call(layer, wide))
    gain = jnp.full(D, 1.1, jnp.float32)  # does not widen the result: it is no activation
    assert dtype_of(normed, (gate, gain)) == jnp.bfloat16


def test_a_bias_that_cannot_be_inside_the_matmul():
    """The bias is wider than the product, so it widens the sum, as in flax."""
    how = {"recipe": RECIPES["delayed"], "preferred_element_type": jnp.bfloat16, **INIT}
    arrays = arrays_of(SWIGLU, jnp.float32)
    before = nnx.jit(lambda layer, arrays: layer(SWIGLU(*arrays)))
    with casts_of_x() as seen, jax.numpy_dtype_promotion("standard"):
        y = call(LAYERS["linear"](prologue=SWIGLU, **how), arrays)
        assert seen == [SWIGLU]
        assert y.dtype == jnp.float32
        assert_same_bits(y, before(LAYERS["linear"](**how), arrays))


@pytest.mark.parametrize(
    ("kind", "attribute", "theirs"),
    [("linear", "dot_general", jax.lax.dot_general), ("einsum", "einsum_op", jnp.einsum)],
)
def test_with_a_matmul_of_jax_the_prologue_comes_before_it(kind, attribute, theirs):
    arrays = arrays_of(SWIGLU)
    layer, plain = (LAYERS[kind](prologue=each, dtype=jnp.bfloat16) for each in (SWIGLU, None))
    for each in (layer, plain):
        setattr(each, attribute, theirs)
    assert_same_bits(layer(arrays), plain(SWIGLU(*arrays)))


def test_einsum_str_of_the_call():
    arrays, other = arrays_of(SWIGLU), "bsd, df -> bsf"
    layer, plain = (LAYERS["einsum"](prologue=each, dtype=jnp.bfloat16) for each in (SWIGLU, None))
    mine = nnx.jit(lambda layer, arrays: layer(arrays, other))
    before = nnx.jit(lambda layer, arrays: layer(SWIGLU(*arrays), other))
    assert_same_bits(mine(layer, arrays), before(plain, arrays))
    with pytest.raises(ValueError, match="must be explicit"):
        layer(arrays, "bsd,df")


@pytest.mark.parametrize(
    ("kind", "prologue", "mesh"),
    [
        pytest.param("linear", RMS_NORM, AxisType.Auto, id="linear-auto", marks=SLOW),
        pytest.param("einsum", SWIGLU, AxisType.Explicit, id="einsum-explicit", marks=SLOW),
        pytest.param("linear", RMS_NORM, AxisType.Explicit, id="linear-explicit"),
        pytest.param("einsum", SWIGLU, AxisType.Auto, id="einsum-auto", marks=SLOW),
    ],
)
def test_on_a_mesh(kind, prologue, mesh):
    """A batch that is split, and a result whose sharding the call names."""
    make = functools.partial(LAYERS[kind], dtype=jnp.bfloat16, recipe=RECIPES["delayed"])
    how = {"out_sharding": P(None, "d")} if mesh == AxisType.Explicit else {}
    mesh = jax.make_mesh((8,), ("d",), axis_types=(mesh,))
    lie = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))

    def run(layer, arrays, before):
        def loss(layer, arrays):
            y = layer(before(*arrays), **how)
            return jnp.sum(jnp.square(y.astype(jnp.float32))), y

        return fp8.nnx.value_and_grad(loss, has_aux=True)(layer, arrays)

    run = nnx.jit(run, static_argnums=2)
    mine, plain, arrays = make(prologue=prologue), make(), arrays_of(prologue)
    with jax.set_mesh(mesh):
        for each in (mine, plain):
            nnx.update(each, jax.tree.map(lie, nnx.state(each)))
        arrays = tuple(lie(x, *("d",) * (x.ndim > 1)) for x in arrays)
        got = run(mine, arrays, lambda *x: x)
        assert_same_bits(got, run(plain, arrays, prologue))
        if how:
            assert got[0][1].sharding.spec == P(None, "d", None)
        assert_same_bits(nnx.state(mine), nnx.state(plain))


def test_ops_take_it_in_the_call():
    """The prologue belongs to the operands, so one op may be called with and without."""
    arrays, w = arrays_of(SWIGLU), jnp.ones((D, F), jnp.bfloat16)
    op, plug = FP8EinsumOp(RECIPES["delayed"]), FP8DotGeneral(RECIPES["current"])
    numbers = (((2,), (0,)), ((), ()))
    with casts_of_x() as seen:
        one = op(EQUATION, arrays, w, prologue=SWIGLU), plug(arrays, w, numbers, prologue=SWIGLU)
    assert seen == [SWIGLU, SWIGLU]
    assert_same_bits(one, (op(EQUATION, SWIGLU(*arrays), w), plug(SWIGLU(*arrays), w, numbers)))


def refused(make):
    def layer(prologue):
        return make(prologue=prologue, dtype=jnp.bfloat16)

    variables = tuple(map(nnx.Param, arrays_of(SWIGLU)))
    without = Message(
        TypeError, lambda: layer(None)(variables), "inputs is a tuple of 2", "one array",
        "prologue=",
    )  # fmt: skip
    return mistakes(layer) | {"a tuple of Variables without": without}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("mistake", refused(LAYERS["linear"]))
def test_messages(layer, mistake):
    messages.check(refused(LAYERS[layer])[mistake])


def test_an_equation_that_sums_its_input_is_refused():
    how = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0), "prologue": SWIGLU}
    with pytest.raises(ValueError, match="index 's' of lhs before the matmul"):
        FP8Einsum("bsd,df->bf", (D, F), **how)(arrays_of(SWIGLU))


def test_linear_general_has_no_such_argument():
    with pytest.raises(TypeError, match=r"LinearGeneral.*unexpected keyword argument 'prologue'"):
        FP8LinearGeneral(D, F, prologue=SWIGLU, rngs=nnx.Rngs(0))
