"""A matmul with a bias: that of the two steps, and a gradient that is summed in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import quantized
from hard_inputs import mentions
from interpreter import interpreted, needs_mosaic
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "careful": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "static": fp8.recipes.static(x_scale=0.01, w_scale=0.01, g_scale=0.01),
    "identity": fp8.recipes.identity(),
}
B, S, D, F = 2, 64, 160, 96


def arrays(dtype=jnp.bfloat16):
    """Of NumPy: of jax.random each shape and dtype is a program."""
    random, shapes = np.random.default_rng(0), ((B, S, D), (D, F), (F,), (B, S, F))
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def along_last(b, ndim):
    return b.reshape((1,) * (ndim - 1) + b.shape)


def matmul(recipe, x, w, b, state, *, inside, casts=None):
    how = {"kernels": fp8.Kernels(casts=casts)}
    if inside:
        return fp8.dot(x, w, recipe=recipe, state=state, bias=b, **how)
    return fp8.dot(x, w, recipe=recipe, state=state, **how) + along_last(b.astype(x.dtype), x.ndim)


def step(recipe, x, w, b, c, state, *, dot=matmul, **how):
    """Result, gradients and state; the gradient of the result is c."""

    def loss(params, state):
        y = dot(recipe, *params, state, **how)
        return jnp.sum((y * c).astype(jnp.float32)), y

    return fp8.value_and_grad(loss, has_aux=True)((x, w, b), state)


def check(mine, theirs, g, dtype, parts=1):
    """Everything but the gradient of the bias has the bits of the two steps.

    That is nearly the exact sum of g [B, S, F].

    `parts`: how many gradients it is the sum of, each rounded to the dtype.
    """
    (_, y), (dx, dw, db), state = mine
    (_, wanted), (wanted_dx, wanted_dw, _), wanted_state = theirs
    assert_same_bits((y, dx, dw, state), (wanted, wanted_dx, wanted_dw, wanted_state))
    g = np.asarray(g, np.float64).reshape(parts, -1, g.shape[-1])
    added, rounded = np.abs(g).sum((0, 1)), np.abs(g.sum(1)).sum(0)
    assert db.dtype == dtype
    bound = 2.0**-24 * S * added + parts * float(jnp.finfo(dtype).eps) * rounded
    np.testing.assert_array_less(np.abs(np.asarray(db, np.float64) - g.sum((0, 1))), bound)


jitted = jax.jit(step, static_argnums=0, static_argnames=("dot", "inside", "casts"))


def some(names, few):
    """The rest differs from these few in what has tests of its own."""
    return [pytest.param(name, marks=() if name in few else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some(RECIPES, ("delayed", "blockwise", "identity")))
def test_value_and_gradients(name):
    recipe, (x, w, b, c) = RECIPES[name], arrays()
    state = fp8.init_state(recipe)
    for _ in range(2 if recipe.rows else 1):  # the second step finds its scales set
        mine, theirs = (
            jitted(recipe, x, w, b, c, state, inside=inside) for inside in (True, False)
        )
        if recipe.is_identity:
            assert_same_bits(mine, theirs)  # JAX's own gradient
        else:
            check(mine, theirs, c, b.dtype)
        state = theirs[2]


@needs_mosaic
@pytest.mark.parametrize("name", some([*RECIPES][:-1], ("delayed", "mxfp8")))
def test_kernels_sum_on_their_way(name):
    recipe, (x, w, b, c) = RECIPES[name], arrays()
    c = jnp.round(4 * c)  # integers have one sum, in any order
    state = fp8.init_state(recipe)
    mine = interpreted(lambda: step(recipe, x, w, b, c, state, inside=True, casts="mosaic"))
    assert_same_bits(mine, step(recipe, x, w, b, c, state, inside=True))


@needs_mosaic
def test_kernels_do_not_sum_over_an_axis_of_the_weight():
    """Of w [D, heads, 32] the last axis but one of the gradient is no axis of tokens."""
    recipe, (x, _, _, _) = RECIPES["current"], arrays()
    w, b, c = (
        jnp.round(3 * jax.random.normal(jax.random.key(n), s, x.dtype))
        for n, s in enumerate(((D, 32, 32), (32, 32), (B, S, 32, 32)))
    )

    def dot(recipe, x, w, b, state, *, casts):
        kernels = fp8.Kernels(casts=casts)
        return fp8.dot_general(
            x,
            w,
            (((2,), (0,)), ((), ())),
            recipe=recipe,
            state=state,
            bias=b,
            kernels=kernels,
        )

    run = functools.partial(step, recipe, x, w, b, c, (), dot=dot)
    assert_same_bits(interpreted(lambda: run(casts="mosaic")), run(casts="xla"))


def test_a_float32_bias_of_a_bfloat16_matmul():
    """Is added in bfloat16, but the sum of its gradient never is in it.

    Of many ones no bit is lost, and bfloat16 does not hold 1025.
    """
    x, w, b, _ = arrays()
    c = np.ones((16, S, F), jnp.bfloat16)
    c[:, :, 0] = 1 + 2.0**-7
    c[0, 0, 1] = 2
    x = jnp.concatenate([x] * 8)
    b = b.astype(jnp.float32)
    (_, y), (_, _, db), _ = jitted(RECIPES["current"], x, w, b, c, (), inside=True)
    assert (y.dtype, db.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(db[:2], np.float32([16 * S * (1 + 2.0**-7), 16 * S + 1]))


def heads(recipe, x, w, b, state, *, inside):
    """Several kept axes of w, between others."""
    w, b = w.reshape(D, 8, F // 8).swapaxes(0, 1), b.reshape(8, F // 8)
    dot = functools.partial(
        fp8.dot_general, x, w, (((2,), (1,)), ((), ())), recipe=recipe, state=state
    )
    return (dot(bias=b) if inside else dot() + b[None, None]).reshape(B, S, F)


def experts(recipe, x, w, b, state, *, inside):
    """A batch axis: a bias for each matrix."""
    w, b = jnp.stack([w, 2 * w]), jnp.stack([b, 2 * b])
    dot = functools.partial(
        fp8.dot_general, x, w, (((2,), (1,)), ((0,), (0,))), recipe=recipe, state=state
    )
    return dot(bias=b) if inside else dot() + b[:, None]


def mapped(recipe, x, w, b, state, *, inside):
    dot = functools.partial(matmul, recipe, inside=inside)
    return jax.vmap(dot, in_axes=(0, None, None, None))(x, w, b, state)


def layers(recipe, x, w, b, state, *, inside):
    """scan over remat."""
    dot = jax.checkpoint(
        functools.partial(matmul, recipe, inside=inside), policy=fp8.save_fp8_residuals()
    )
    return jax.lax.scan(lambda carry, x: (carry, dot(x, w, b, state)), None, x)[1]


def vector(recipe, x, w, b, state, *, inside):
    """No axis to sum along."""
    y = matmul(recipe, x[0, 0], w, b, state, inside=inside)
    return jnp.zeros((B, S, F), y.dtype).at[0, 0].set(y)


def products(names, hows, few):
    """Of recipes and of how they are used; those that are not among the few are slow."""
    return [
        pytest.param(name, *how, marks=() if (name, *how) in few else pytest.mark.slow)
        for name in names
        for how in hows
    ]


DOTS = [heads, experts, mapped, layers, vector]
FEW = {("blockwise", dot) for dot in (heads, experts, layers)} | {("current", vector)}


@pytest.mark.parametrize(
    ("name", "dot"), products(("current", "blockwise"), [(dot,) for dot in DOTS], FEW)
)
def test_shapes_and_transformations(name, dot):
    recipe, (x, w, b, c) = RECIPES[name], arrays()
    mine, theirs = (
        jitted(recipe, x, w, b, c, (), dot=dot, inside=inside) for inside in (True, False)
    )
    if dot is vector:
        c = c.at[1:].set(0).at[0, 1:].set(0)
    if dot is experts:
        c = c * jnp.array([1, 2], c.dtype)[:, None, None]  # as b is used
    check(mine, theirs, c, b.dtype, parts=B if dot in (experts, mapped, layers) else 1)


# Spec of x, of w and of b.
SPECS = {
    "data": (P("a"), P(), P()),
    "columns": (P(), P(None, "a"), P("a")),
    "both": (P("a"), P(None, "b"), P("b")),
    "kept whole": (P("a"), P(None, "b"), P()),  # of b
}


PLACES = [
    (AxisType.Auto, "both"),
    *((AxisType.Explicit, how) for how in SPECS),
    *(("shard_map", how) for how in ("data", "columns", "both")),
]
QUICK = (AxisType.Explicit, "both"), (AxisType.Explicit, "kept whole"), ("shard_map", "both")


@pytest.mark.parametrize(
    ("name", "kind", "how"),
    products(("delayed", "blockwise"), PLACES, [("blockwise", *place) for place in QUICK]),
    ids=str,
)
def test_on_meshes(name, kind, how):
    recipe = RECIPES[name]
    random, shapes = np.random.default_rng(0), ((512, 128), (128, 256), (256,), (512, 256))
    x, w, b, c = (np.float32(np.round(3 * random.standard_normal(shape))) for shape in shapes)
    state = fp8.init_state(recipe)
    wanted = jitted(recipe, x, w, b, c, state, inside=True)
    mesh = jax.make_mesh(
        (2, 2),
        ("a", "b"),
        axis_types=(AxisType.Auto if kind == "shard_map" else kind,) * 2,
        devices=jax.devices()[:4],
    )
    of_x, of_w, of_b = SPECS[how]
    of_c = P(*(of_x[:1] or (None,)), *of_w[1:])

    def dot(recipe, x, w, b, state, *, inside):
        matmul_here = functools.partial(matmul, recipe, inside=inside)
        if kind != "shard_map":
            return matmul_here(x, w, b, state)
        return jax.shard_map(matmul_here, in_specs=(of_x, of_w, of_b, P()), out_specs=of_c)(
            x, w, b, state
        )

    with jax.set_mesh(mesh):
        place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
        arguments = [place(*each) for each in ((x, of_x), (w, of_w), (b, of_b), (c, of_c))]
        mine = jitted(
            recipe,
            *arguments,
            jax.device_put(state, NamedSharding(mesh, P())),
            dot=dot,
            inside=True,
        )
    assert_same_bits(jax.tree.map(np.asarray, mine[1][2]), np.asarray(wanted[1][2]))
    np.testing.assert_allclose(mine[0][1], wanted[0][1], rtol=1e-5, atol=1e-3)
    if kind == AxisType.Explicit:
        assert jax.typeof(mine[1][2]).sharding.spec == jax.typeof(arguments[2]).sharding.spec


def test_a_bias_alone_can_be_trained():
    """No matmul is differentiated, so that no state has to be collected.

    By kernels, and by ours.
    """
    x, w, b, c = arrays(jnp.float32)
    recipe = RECIPES["delayed"]
    state = fp8.init_state(recipe)
    loss = lambda b, state: jnp.sum(fp8.dot(x, w, recipe=recipe, state=state, bias=b) * c)
    wanted = np.asarray(c, np.float64).sum((0, 1))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(b, state), wanted, atol=1e-4)
    ours = jax.jit(fp8.value_and_grad(loss))
    np.testing.assert_allclose(ours(b, state)[1], wanted, atol=1e-4)
    with pytest.raises(fp8.FP8StateError, match="not collected"):
        jax.grad(lambda w: jnp.sum(fp8.dot(x, w, recipe=recipe, state=state, bias=b)))(w)
    with pytest.raises(fp8.FP8StateError, match="not collected"):
        jax.grad(loss, 1)(b, state)


def test_the_bias_does_not_decide_how_the_result_lies():
    """In an Explicit mesh: else the gradient would be cut as the bias is, and its tiles with it."""
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )
    x, w, b = jnp.ones((256, 128)), jnp.ones((128, 128)), jnp.ones(128)
    with jax.set_mesh(mesh):
        x, w, b = (
            jax.device_put(v, NamedSharding(mesh, spec))
            for v, spec in ((x, P("a")), (w, P()), (b, P(("a", "b"))))
        )
        run = jax.jit(
            jax.grad(
                lambda b, x, w: jnp.sum(fp8.dot(x, w, recipe=RECIPES["blockwise"], bias=b)),
                argnums=(0, 1, 2),
            )
        )
        db, _, _ = run(b, x, w)
    assert jax.typeof(db).sharding.spec == P(("a", "b"))
    np.testing.assert_array_equal(db, 256.0)


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        c = np.array([[1e9], [1.0], [-1e9], [0.0]])
        loss = lambda b: jnp.sum(
            c * fp8.dot(jnp.ones((4, 2)), jnp.ones((2, 1)), recipe=RECIPES["current"], bias=b)
        )
        assert jax.jit(jax.grad(loss))(jnp.zeros(1)) == 1.0


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        (jnp.ones(F + 1), ValueError, ("bias has shape [97]", "[96]")),
        (jnp.ones((1, F)), ValueError, ("bias has shape [1, 96]", "Reshape it")),
        (jnp.ones(()), ValueError, ("bias has shape []",)),
        (jnp.ones(F, jnp.int32), TypeError, ("bias has dtype int32", "Cast it")),
        (quantized(jnp.ones(F)), TypeError, ("bias is of type QuantizedTensor",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("name", ["current", "identity"])
def test_misuse(name, bias, error, words):
    x, w, _, _ = arrays()
    with pytest.raises(error, match=mentions(*words)):
        fp8.dot(x, w, recipe=RECIPES[name], bias=bias)


def test_no_second_derivative():
    x, w, b, _ = arrays(jnp.float32)
    loss = lambda b: jnp.sum(fp8.dot(x, w, recipe=RECIPES["current"], bias=b) ** 2)
    with pytest.raises(fp8.FP8StateError, match="second derivative"):
        jax.grad(lambda b: jax.grad(loss)(b).sum())(b)
