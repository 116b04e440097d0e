"""`prologue=` of linen layers: the bits of the prologue before the layer, and of `fp8.dot`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linen_made import made
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
    random_like,
)
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import (
    COLLECTION,
    FP8Dense,
    FP8DenseGeneral,
    FP8DotGeneral,
    FP8Einsum,
    FP8EinsumOp,
)

SLOW = pytest.mark.slow
KEY, EQUATION = jax.random.key(0), "bsd,df->bfs"
LAYERS = {
    "dense": lambda **fields: FP8Dense(F, **fields),
    "einsum": lambda **fields: FP8Einsum((D, F), EQUATION, **fields),
}


def by_op(kind, recipe, prologue, params, state, arrays):
    """What the layer computes, written with functions."""
    w, bias = params["kernel"].astype(jnp.bfloat16), params["bias"].astype(jnp.bfloat16)
    state = jax.tree.leaves(state, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    how = {"recipe": recipe, "state": state[0] if state else None, "prologue": prologue}
    if kind == "dense":
        return fp8.dot(arrays, w, bias=bias, **how)
    return fp8.einsum(EQUATION, arrays, w, **how) + bias.reshape(1, F, 1)


def compiled(apply):
    """A step: values, gradients of parameters and arrays, and the new state."""

    def loss(given, state):
        params, arrays = given
        y = apply(params, state, arrays)
        return jnp.sum((y * cotangent(y.shape, y.dtype)).astype(jnp.float32)), y

    return jax.jit(fp8.value_and_grad(loss, has_aux=True))


def apply(layer, params, state, inputs):
    return layer.apply({"params": params, COLLECTION: state}, inputs)


@pytest.mark.parametrize(
    ("kind", "recipe", "prologue"),
    [
        ("dense", "delayed", SWIGLU),
        pytest.param("dense", "blockwise", RMS_NORM, marks=SLOW),
        pytest.param("dense", "identity", RMS_NORM, marks=SLOW),
        ("einsum", "current", RMS_NORM),
        pytest.param("einsum", "delayed", RMS_NORM, marks=SLOW),
        pytest.param("einsum", "blockwise", SWIGLU, marks=SLOW),
        ("einsum", "identity", SWIGLU),
    ],
)
def test_same_bits(kind, recipe, prologue):
    recipe, arrays = RECIPES[recipe], arrays_of(prologue)
    make = functools.partial(LAYERS[kind], recipe=recipe, dtype=jnp.bfloat16)
    layer, plain = make(prologue=prologue), make()
    variables = made(layer, arrays)
    assert_same_bits(variables, made(plain, arrays[0]))
    params, state = random_like(variables["params"]), variables.get(COLLECTION, {})
    by_hand = compiled(functools.partial(by_op, kind, recipe, prologue))
    given = params, arrays
    if recipe.rows:  # the second step finds its scales set
        state = by_hand(given, state)[2]
    with casts_of_x() as seen:
        mine = compiled(functools.partial(apply, layer))(given, state)
    assert set(seen) == (set() if recipe.is_identity else {prologue})
    assert_same_bits(mine, by_hand(given, state))
    if kind == "dense" and not recipe.is_identity:
        before = lambda params, state, arrays: apply(plain, params, state, prologue(*arrays))
        assert_same_bits(mine, compiled(before)(given, state))


@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_start_like_those_of_a_layer_without(kind):
    make = functools.partial(LAYERS[kind], recipe=RECIPES["delayed"], dtype=jnp.bfloat16)
    arrays = arrays_of(SWIGLU)
    inits = [functools.partial(make(prologue=SWIGLU).init, KEY, arrays)]
    inits.append(functools.partial(make().init, KEY, arrays[0]))
    assert_same_bits(*jax.jit(lambda: [init() for init in inits])())


class MLP(nn.Module):
    """A gated MLP. The one line that changes is the last."""

    fused: bool
    act: str = "prologue"
    dense: type = FP8Dense

    @nn.compact
    def __call__(self, x, _=None):
        gate, up = self.dense(F, name="gate")(x), self.dense(F, name="up")(x)
        if self.fused:
            return FP8Dense(D, name="down", prologue=fp8.prologues.SwiGLU())((gate, up)), None
        h = nn.silu(gate) * up if self.act == "flax" else fp8.prologues.SwiGLU()(gate, up)
        return FP8Dense(D, name="down")(h), None


# Only the layer with a prologue is in FP8: two more in each program take most of its time.
mlp = functools.partial(MLP, dense=nn.Dense)


def layers_of(**lifted):
    """scan over remat, residuals in FP8 kept."""
    remat = nn.remat(MLP, policy=fp8.save_fp8_residuals(), prevent_cse=False)
    how = {"variable_axes": {"params": 0, COLLECTION: 0}, "split_rngs": {"params": True}}
    return lambda fused: nn.scan(remat, length=2, **how)(fused, dense=nn.Dense)


def experts_of():
    axes = {"params": 0, COLLECTION: 0}
    return lambda fused: nn.vmap(MLP, axes, split_rngs={"params": True})(fused, dense=nn.Dense)


@pytest.mark.parametrize(
    "make",
    [pytest.param(mlp, marks=SLOW), layers_of(), pytest.param(experts_of(), marks=SLOW)],
    ids=["mlp", "scan of remat", "vmap"],
)
def test_mlp(make):
    x = np.random.default_rng(0).standard_normal((B, S, D)).astype(np.float32)
    variables = made(make(True), x, recipe=FP8Dense(1).recipe)
    assert_same_bits(variables, made(make(False), x, recipe=FP8Dense(1).recipe))
    params, state = variables["params"], variables[COLLECTION]

    def run(model):
        def loss(given, state):
            params, x = given
            y, _ = model.apply({"params": params, COLLECTION: state}, x)
            return jnp.sum(jnp.square(y)), y

        return jax.jit(fp8.value_and_grad(loss, has_aux=True))((params, x), state)

    mine = run(make(True))
    assert_same_bits(mine, run(make(False)))
    if make is mlp:  # without a rounding in between, flax's own activation agrees
        theirs, _ = jax.jit(mlp(False, "flax").apply)(variables, x)
        np.testing.assert_allclose(mine[0][1], theirs, rtol=0, atol=0.1)


def test_dtypes():
    """Activations are promoted as flax does it. A gain keeps its dtype."""
    x, gain = arrays_of(RMS_NORM, jnp.float32)
    layer = FP8Dense(F, recipe=RECIPES["current"], dtype=jnp.bfloat16, prologue=RMS_NORM)
    variables, run = made(layer, (x, gain)), jax.jit(layer.apply)
    y = run(variables, (x, gain))
    low, w = x.astype(jnp.bfloat16), variables["params"]["kernel"].astype(jnp.bfloat16)
    dot = functools.partial(fp8.dot, recipe=RECIPES["current"], prologue=RMS_NORM)
    bias = variables["params"]["bias"].astype(jnp.bfloat16)
    assert_same_bits(y, jax.jit(functools.partial(dot, bias=bias))((low, gain), w))
    assert jnp.any(y != run(variables, (low, gain.astype(jnp.bfloat16))))


@pytest.mark.usefixtures("standard_promotion")
def test_promotion():
    gate, up = arrays_of(SWIGLU)
    layer = FP8Dense(F, recipe=RECIPES["current"], prologue=SWIGLU, param_dtype=jnp.bfloat16)
    wide = gate.astype(jnp.float32), up.astype(jnp.float32)
    variables, run = made(layer, (gate, up)), jax.jit(layer.apply)
    dtype = lambda layer, arrays: jax.eval_shape(layer.apply, variables, arrays).dtype
    assert dtype(layer, (gate, up)) == jnp.bfloat16
    assert_same_bits(run(variables, (gate, wide[1])), run(variables, wide))
    assert dtype(layer, (gate.astype(jnp.int32), wide[1])) == jnp.float32
    gain = jnp.full(D, 1.1, jnp.float32)  # does not widen the result: it is no activation
    assert dtype(layer.clone(prologue=RMS_NORM), (gate, gain)) == jnp.bfloat16


def test_a_bias_that_cannot_be_inside_the_matmul():
    one = lambda key, shape, dtype: jnp.ones(1, dtype)
    make = functools.partial(FP8Dense, F, recipe=RECIPES["delayed"], bias_init=one)
    arrays = arrays_of(SWIGLU, jnp.float32)
    variables = made(make(prologue=SWIGLU), arrays)
    with casts_of_x() as seen:
        y = jax.jit(make(prologue=SWIGLU).apply)(variables, arrays)
    assert seen == [SWIGLU]
    before = jax.jit(lambda variables, arrays: make().apply(variables, SWIGLU(*arrays)))
    assert_same_bits(y, before(variables, arrays))


@pytest.mark.parametrize(
    ("kind", "prologue", "mesh"),
    [
        pytest.param("dense", SWIGLU, AxisType.Auto, id="dense-auto", marks=SLOW),
        pytest.param("einsum", RMS_NORM, AxisType.Explicit, id="einsum-explicit"),
        pytest.param("dense", SWIGLU, AxisType.Explicit, id="dense-explicit", marks=SLOW),
        pytest.param("einsum", RMS_NORM, AxisType.Auto, id="einsum-auto", marks=SLOW),
    ],
)
def test_on_a_mesh(kind, prologue, mesh):
    """A batch that is split, and a kernel that is gathered in FP8."""
    recipe, arrays = RECIPES["delayed"], arrays_of(prologue)
    make = functools.partial(LAYERS[kind], recipe=recipe, dtype=jnp.bfloat16)
    variables = made(make(), arrays[0])
    params, state = jax.device_get(random_like(variables["params"])), variables[COLLECTION]
    mesh = jax.make_mesh((8,), ("d",), axis_types=(mesh,))
    lie = lambda tree, *spec: jax.device_put(tree, jax.NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        make = functools.partial(make, w_shard=fp8.Shard(0, "d"))
        plain = make()
        split = tuple(lie(x, *("d",) * (x.ndim > 1)) for x in arrays)
        params = {"kernel": lie(params["kernel"], "d"), "bias": lie(params["bias"])}
        before = lambda params, state, arrays: apply(plain, params, state, prologue(*arrays))
        mine = functools.partial(apply, make(prologue=prologue))
        given = ((params, split), lie(state))
        assert_same_bits(step_on(mesh, mine, *given), step_on(mesh, before, *given))


def step_on(mesh, apply, given, state):
    def loss(given, state):
        params, arrays = given
        y = apply(params, state, arrays)
        return jnp.sum(jnp.square(y.astype(jnp.float32))), y

    return jax.jit(fp8.value_and_grad(loss, has_aux=True))(given, state)


def test_ops_take_it_in_the_call():
    """The prologue belongs to the operands, so one op may be called with and without."""

    class Both(nn.Module):
        prologue: fp8.prologues.SwiGLU | None

        @nn.compact
        def __call__(self, gate, up):
            w = self.param("w", nn.initializers.lecun_normal(), (D, F), jnp.bfloat16)
            lhs = (gate, up) if self.prologue else SWIGLU(gate, up)
            op, plug = FP8EinsumOp(RECIPES["delayed"]), FP8DotGeneral(RECIPES["current"])
            y = op(EQUATION, lhs, w, prologue=self.prologue)
            return y, plug(lhs, w, (((2,), (0,)), ((), ())), prologue=self.prologue)

    arrays = arrays_of(SWIGLU)
    with casts_of_x() as seen:
        one = jax.jit(Both(SWIGLU).init_with_output)(KEY, *arrays)
    assert seen == [SWIGLU, SWIGLU]
    assert_same_bits(one, jax.jit(Both(None).init_with_output)(KEY, *arrays))


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_equal_layers_are_equal(make):
    one, same = make(prologue=fp8.prologues.SwiGLU()), make(prologue=fp8.prologues.SwiGLU())
    assert one == same
    assert hash(one) == hash(same)
    assert one == one.clone()
    assert make() == one.clone(prologue=None)
    others = [make(), make(prologue=RMS_NORM), make(prologue=fp8.prologues.RMSNorm(epsilon=1e-5))]
    assert len({one, same, *others}) == 4


def refused(make):
    def layer(prologue):
        return functools.partial(make(prologue=prologue, dtype=jnp.bfloat16).init, KEY)

    return mistakes(layer)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("mistake", refused(LAYERS["dense"]))
def test_messages(layer, mistake):
    messages.check(refused(LAYERS[layer])[mistake])


def test_an_equation_that_sums_its_input_is_refused():
    layer = FP8Einsum((D, F), "bsd,df->bf", dtype=jnp.bfloat16, prologue=SWIGLU)
    with pytest.raises(ValueError, match="index 's' of lhs before the matmul"):
        layer.init(KEY, arrays_of(SWIGLU))


@pytest.mark.parametrize(
    "make",
    [lambda **f: FP8DenseGeneral(F, **f), FP8DotGeneral, FP8EinsumOp],
    ids=["general", "plug", "op"],
)
def test_others_have_no_such_field(make):
    with pytest.raises(TypeError, match="unexpected keyword argument 'prologue'"):
        make(prologue=SWIGLU)
