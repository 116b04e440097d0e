"""`fp8.quantize_params`: the results of weights in high precision to the bit, with fewer casts."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from jax import lax
from primitives import count
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.weights import QuantizedWeight, WeightAxes

RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "current": fp8.recipes.current(),
    "rowwise_hp_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    # Powers of two, because XLA for CPUs folds two constants: (y * 0.1) * 0.1 is y * 0.01.
    "static": fp8.recipes.static(x_scale=0.125, w_scale=0.125, g_scale=0.125),
    "mxfp8_2d": fp8.recipes.mxfp8(w_tile_dim=2),
}
# FP8 copies of a weight: one if the matmuls of both directions can read it.
COPIES = dict.fromkeys(RECIPES, 1) | {"rowwise": 2, "rowwise_hp_wgrad": 2, "mxfp8": 2}
FEW = ("delayed", "rowwise", "blockwise", "mxfp8")
WAYS = ("cached", "primary")
RULES = [("w", WeightAxes())]
M, K, N = 24, 160, 48  # ragged in tiles of 32 and of 128


def rows(few=FEW):
    return [pytest.param(n, marks=() if n in few else pytest.mark.slow) for n in RECIPES]


def normal(i, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(i), shape, jnp.dtype(dtype))


def held(way, params, recipe, state=(), rules=RULES, **options):
    """The parameters themselves, or with weights in FP8."""
    if way == "plain":
        return params
    return fp8.quantize_params(
        params, recipe, rules=rules, state=state, primary=way == "primary", **options
    )


def init(recipe, stacked=()):
    """The state of the matmul that reads "w"; () for a recipe without state."""
    if not recipe.rows:
        return ()
    state = fp8.init_state(recipe)
    return {"w": jax.tree.map(lambda a: jnp.broadcast_to(a, (*stacked, *a.shape)), state)}


def dot(x, w, recipe, state, **options):
    return fp8.dot(x, w, recipe=recipe, state=state["w"] if recipe.rows else None, **options)


def steps(recipe, way, w, x, bias, c):
    """y, gradients and state of two steps. The second finds its scales set."""

    def loss(params, state, x):
        y = dot(x, params["w"], recipe, state, bias=params["bias"])
        return jnp.sum((y * c).astype(jnp.float32)), y

    found, state = [], init(recipe)
    for i in range(2 if recipe.rows else 1):
        params = held(way, {"w": w * (1 + i), "bias": bias}, recipe, state)
        (_, y), grads, state = fp8.value_and_grad(loss, has_aux=True)(params, state, x)
        found.append((y, grads, state))
    return found


PAIRS = [("delayed", "bfloat16"), ("mxfp8", "float16"), *((name, "float32") for name in FEW)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in PAIRS else pytest.mark.slow)
        for name in RECIPES
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_same_bits(name, dtype):
    """Results, gradients and next state, from an unset state, and then from a set one."""
    recipe = RECIPES[name]
    arrays = [normal(i, *s, dtype=dtype) for i, s in enumerate([(K, N), (M, K), (N,), (M, N)])]
    want, *got = (
        jax.jit(functools.partial(steps, recipe, way))(*arrays) for way in ("plain", *WAYS)
    )
    for each in got:
        assert_same_bits(each, want)
    assert want[-1][1]["w"].dtype == dtype
    assert jnp.any(want[-1][1]["w"] != 0)


# Layers under a scan, and microbatches under another one.
LAYERS, MICRO, D = 2, 8, 32


def accumulated(recipe, way, w, state, xs):
    """A step of MICRO microbatches: loss, gradients, next state."""

    def loss(params, state, x):
        def layer(x, own):
            w, s = own
            return jnp.tanh(dot(x, w, recipe, {"w": s})), None

        y, _ = lax.scan(layer, x, (params["w"], state["w"] if recipe.rows else None))
        return jnp.sum(y.astype(jnp.float32))

    params = held(way, {"w": w}, recipe, state, rules=[("w", WeightAxes(stacked=1))])
    grad = fp8.value_and_grad(loss, commit=False)

    def micro(total, x):
        value, grads, seen = grad(params, state, x)
        seen = fp8.merge_seen(total[2], seen) if recipe.rows else ()
        grads = total[1] + grads["w"].astype(jnp.float32)
        return (total[0] + value, grads, seen), None

    nothing = fp8.nothing_seen(state) if recipe.rows else ()
    start = jnp.float32(0), jnp.zeros(w.shape), nothing
    (value, grads, seen), _ = lax.scan(micro, start, xs)
    return value, grads, fp8.commit(state, seen) if recipe.rows else ()


STACK = normal(0, LAYERS, D, D, dtype="bfloat16") / 4
BATCHES = normal(1, MICRO, 16, D, dtype="bfloat16")


def work(jaxpr, shape, times=1):
    """The values of arrays [..., *shape] that are cast to FP8, and that amaxes are taken of.

    Those of a loop count as often as it runs.
    """
    cast = reduced = 0
    for e in jaxpr.eqns:
        like = [v.aval.shape for v in (*e.invars, *e.outvars)]
        size = max((np.prod(s, dtype=int) for s in like if s[-2:] == shape), default=0) * times
        if e.primitive.name == "convert_element_type" and size:
            cast += size * e.params["new_dtype"].name.startswith("float8_e4m3")
        elif e.primitive.name.startswith("reduce_max"):
            reduced += size
        inner = times * e.params["length"] if e.primitive.name == "scan" else times
        parameters = jax.tree.leaves(
            list(e.params.values()), is_leaf=lambda n: hasattr(n, "eqns") or hasattr(n, "jaxpr")
        )
        for p in parameters:
            p = getattr(p, "jaxpr", p)
            if hasattr(p, "eqns"):
                more = work(p, shape, inner)
                cast, reduced = cast + more[0], reduced + more[1]
    return cast, reduced


@pytest.mark.parametrize("name", rows(("delayed", "mxfp8")))
def test_microbatches_of_a_scanned_stack(name):
    """The same bits in two steps. The weights are cast, and their amaxes found, once a step."""
    recipe = RECIPES[name]
    state = init(recipe, (LAYERS,))
    want = None
    for way in ("plain", *WAYS):
        step = jax.jit(functools.partial(accumulated, recipe, way))
        first = step(STACK, state, BATCHES)
        results = first, step(STACK, first[2], BATCHES) if recipe.rows else ()
        want = results if want is None else want
        assert_same_bits(results, want)
        cast, reduced = work(step.trace(STACK, state, BATCHES).jaxpr.jaxpr, (D, D))
        assert cast == COPIES[name] * STACK.size * (MICRO if way == "plain" else 1)
        if way == "plain":
            reduced_each = reduced / MICRO
        assert reduced == reduced_each * (MICRO if way == "plain" else 1)
        assert reduced or not recipe.rows


def test_amaxes_of_microbatches_are_those_of_the_weights():
    """Each layer has its own, counted once."""
    state = init(RECIPES["delayed"], (LAYERS,))
    step = jax.jit(functools.partial(accumulated, RECIPES["delayed"], "primary"))
    history = step(STACK, state, BATCHES)[2]["w"].amax_history
    np.testing.assert_array_equal(
        history[:, 1, -1], jnp.max(jnp.abs(STACK), (1, 2)).astype(jnp.float32)
    )
    np.testing.assert_array_equal(history[:, 1, :-1], 0)


# equation, shapes of x and w, and what the matmul does with the axes of w
EQUATIONS = {
    "heads": ("bshd,hdk->bsk", (2, 5, 4, 64), (4, 64, 40), WeightAxes(contracted=(0, 1))),
    "heads last": ("bshd,khd->bsk", (2, 5, 4, 64), (40, 4, 64), WeightAxes(contracted=(1, 2))),
    "another order": ("bshd,dhk->bsk", (2, 5, 4, 24), (24, 4, 40), WeightAxes(contracted=(1, 0))),
    "kept heads": ("bd,dhk->bhk", (6, 160), (160, 4, 24), WeightAxes()),
    "kept on both sides": ("bd,hdk->bhk", (6, 160), (4, 160, 24), WeightAxes(contracted=(1,))),
    "experts": ("ebk,ekn->ebn", (3, 6, 160), (3, 160, 24), WeightAxes(contracted=(1,), batch=(0,))),
    "experts inside": (
        "ebk,nek->ebn", (3, 6, 160), (24, 3, 160), WeightAxes(contracted=(2,), batch=(1,)),
    ),
}  # fmt: skip


def equations(recipe, way):
    """y, gradients and state of each equation: one program."""
    found = {}
    for name, (equation, x_shape, w_shape, axes) in EQUATIONS.items():
        x, state = normal(1, *x_shape), init(recipe)

        def loss(params, state, x, equation=equation):
            y = fp8.einsum(
                equation, x, params["w"], recipe=recipe, state=state["w"] if recipe.rows else None
            )
            return jnp.sum(jnp.where(y > 0, y, 2 * y)), y

        params = held(way, {"w": normal(0, *w_shape)}, recipe, state, rules=[("w", axes)])
        (_, y), *rest = fp8.value_and_grad(loss, has_aux=True)(params, state, x)
        found[name] = y, rest
    return found


@pytest.mark.parametrize("name", rows(("mxfp8",)))
def test_einsum(name):
    """Several contracted axes, which tiles see as one; experts; axes in every order."""
    want, got = (
        jax.jit(functools.partial(equations, RECIPES[name], way))() for way in ("plain", "primary")
    )
    assert_same_bits(got, want)


def test_merged_axes_cost_no_bytes():
    """A head [64, 40] is half a tile of 128, so two heads share scales."""
    weight = held("primary", {"w": jnp.ones((4, 64, 40))}, RECIPES["blockwise"],
                  rules=[("w", WeightAxes(contracted=(0, 1)))])["w"]  # fmt: skip
    assert weight.shape == (4, 64, 40)
    assert weight.scales[0].shape == (2, 1)


def transformed(recipe, way, transform):
    """y and the gradients of x and w, with a transformation between the loss and the matmul."""
    w, x, c = normal(0, K, N), normal(1, 3, M, K), normal(2, 3, M, N)
    layer = lambda w, x: jnp.maximum(dot(x, w, recipe, ()), 0)

    def loss(params, _):
        y = transform(layer)(params["w"], params["x"])
        return jnp.sum(y * c), y

    params = held(way, {"w": w, "x": x}, recipe)
    (_, y), grads, _ = fp8.value_and_grad(loss, has_aux=True)(params, ())
    return y, grads


def in_while(layer):
    """Forward only: JAX has no gradient of a `while_loop`."""

    def run(w, x):
        body = lambda carry: (carry[0] + 1, layer(*lax.stop_gradient((carry[2], x))), carry[2])
        none = jnp.zeros((*x.shape[:-1], N))
        return lax.while_loop(lambda carry: carry[0] < 2, body, (0, none, w))[1] + layer(w, x)

    return run


TRANSFORMS = {
    "vmap over examples": lambda layer: jax.vmap(layer, in_axes=(None, 0)),
    "cond": lambda layer: (
        lambda w, x: lax.cond(x[0, 0, 0] > 0, lambda w: layer(w, x), lambda w: layer(w, 2 * x), w)
    ),
    "two uses": lambda layer: lambda w, x: layer(w, x) + layer(w, -x),
    "stop_gradient": lambda layer: lambda w, x: layer(lax.stop_gradient(w), x),
    "while": in_while,
    "remat": jax.checkpoint,
} | {
    f"remat, {options}": functools.partial(
        jax.checkpoint, policy=fp8.save_fp8_residuals(**options)
    )
    for options in ({}, {"weights": True}, {"inputs": False})
}  # fmt: skip


@pytest.mark.parametrize("name", rows(("mxfp8",)))
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformations(name, transform):
    if RECIPES[name].rows:
        pytest.skip("a state has one use; see test_same_bits and test_remat_of_delayed")
    want, *got = (
        jax.jit(
            functools.partial(transformed, RECIPES[name], way, TRANSFORMS[transform])
        )()
        for way in ("plain", *(("primary",) if transform != "two uses" else WAYS))
    )  # fmt: skip
    for each in got:
        assert_same_bits(each, want)
    assert jnp.any(want[1]["w"] != 0) == (transform != "stop_gradient")


@pytest.mark.parametrize("options", [{}, {"weights": True}, {"inputs": False}], ids=str)
def test_remat_of_delayed_scaling(options):
    """The amax of the weight leaves the backward pass once, with every policy."""
    recipe = RECIPES["delayed"]
    policy = fp8.save_fp8_residuals(**options)

    def step(way, w, x):
        state = init(recipe)
        layer = jax.checkpoint(lambda w, s, x: jnp.tanh(dot(x, w, recipe, s)), policy=policy)
        loss = lambda params, state: jnp.sum(layer(params["w"], state, x).astype(jnp.bfloat16))
        return fp8.value_and_grad(loss)(held(way, {"w": w}, recipe, state), state)[1:]

    step = jax.jit(step, static_argnums=0)
    arrays = normal(0, K, N), normal(1, M, K)
    assert_same_bits(step("primary", *arrays), step("plain", *arrays))


def plain_loss(params, recipe=RECIPES["mxfp8"], **options):
    return jnp.sum(dot(normal(1, M, K), held("cached", params, recipe, **options)["w"], recipe, ()))


def test_inside_a_loss():
    """`jax.grad` of a loss that quantizes its parameters gives their gradients."""
    params = {"w": normal(0, K, N)}
    direct = lambda params: jnp.sum(dot(normal(1, M, K), params["w"], RECIPES["mxfp8"], ()))
    assert_same_bits(jax.jit(jax.grad(plain_loss))(params), jax.jit(jax.grad(direct))(params))


def test_inside_a_loss_with_state():
    recipe, state = RECIPES["delayed"], init(RECIPES["delayed"])

    def loss(params, state, way):
        return jnp.sum(dot(normal(1, M, K), held(way, params, recipe, state)["w"], recipe, state))

    step = jax.jit(fp8.value_and_grad(loss), static_argnums=2)
    params = {"w": normal(0, K, N)}
    assert_same_bits(step(params, state, "cached"), step(params, state, "plain"))


def test_only_the_bias_is_trained():
    """And only x: with plain `jax.grad`, because the weight in FP8 is no argument."""
    recipe = RECIPES["blockwise"]
    w, x, bias = normal(0, K, N), normal(1, M, K), normal(2, N)
    weight = held("primary", {"w": w}, recipe)["w"]
    grads = jax.jit(
        lambda w: jax.grad(
            lambda x, bias: jnp.sum(dot(x, w, recipe, (), bias=bias)), argnums=(0, 1)
        )(x, bias)
    )
    assert_same_bits(grads(weight), grads(w))


def test_gradient_channel():
    """A loop that overwrites states with their gradients trains weights in FP8, too."""
    recipe = RECIPES["delayed"]

    def step(way):
        state, x = init(recipe), normal(1, M, K)
        params = held(way, {"w": normal(0, K, N)}, recipe, state)

        def loss(both, _):
            return jnp.sum(dot(x, both[0]["w"], recipe, both[1], state_channel="gradient"))

        return fp8.value_and_grad(loss)((params, state), ())[1]

    step = jax.jit(step, static_argnums=0)
    assert_same_bits(step("primary"), step("plain"))


@pytest.mark.parametrize("name", ["current", "blockwise"])
def test_a_layer_s_dtype(name):
    """Weights are rounded to the dtype of the layer before the cast."""
    recipe, w = RECIPES[name], normal(0, K, N)
    quantize = jax.jit(
        lambda w, dtype: held("primary", {"w": w}, recipe, dtype=dtype)["w"], static_argnums=1
    )
    rounded, direct = quantize(w, jnp.bfloat16), quantize(w.astype(jnp.bfloat16), None)
    assert rounded.dtype == direct.dtype == jnp.bfloat16
    assert_same_bits(rounded, direct)
    assert jnp.any(rounded.values[0] != quantize(w, None).values[0])


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("name", rows(("rowwise", "blockwise")))
def test_bytes(name, primary):
    """One byte a weight for each copy, and no array more in a primary weight."""
    weight = jax.eval_shape(
        lambda w: held("primary" if primary else "cached", {"w": w}, RECIPES[name],
                       init(RECIPES[name])),
        jax.ShapeDtypeStruct((1024, 512), jnp.float32),
    )["w"]  # fmt: skip
    size = 1024 * 512
    assert len(weight.values) == COPIES[name]
    assert size * COPIES[name] <= weight.nbytes <= 1.04 * size * COPIES[name]
    large = [leaf.dtype.name for leaf in jax.tree.leaves(weight) if leaf.size == size]
    assert large == ["float8_e4m3fn"] * COPIES[name] + ["float32"] * (not primary)
    assert (weight.shape, weight.ndim, weight.size, weight.dtype) == (
        (1024, 512),
        2,
        size,
        "float32",
    )


def test_rules():
    """The first match decides; None leaves a weight as it is; nothing else changes."""
    params = {
        "embed": {"kernel": jnp.ones((8, 4))},
        "blocks": [{"out": {"kernel": jnp.ones((2, 2, 4))}}, {"up": {"kernel": jnp.ones((4, 4))}}],
        "scale": jnp.ones(4),
    }
    rules = [
        ("embed/.*", None), (".*/out/kernel", WeightAxes(contracted=(0, 1))),
        (".*kernel", WeightAxes()),
    ]  # fmt: skip
    got = fp8.quantize_params(params, RECIPES["current"], rules=rules)
    assert got["embed"]["kernel"] is params["embed"]["kernel"]
    assert got["scale"] is params["scale"]
    out, up = got["blocks"][0]["out"]["kernel"], got["blocks"][1]["up"]["kernel"]
    assert isinstance(out, QuantizedWeight)
    assert (out.axes.contracted, up.axes.contracted) == ((0, 1), (0,))
    assert out.original is params["blocks"][0]["out"]["kernel"]
    one_rule = fp8.quantize_params({"a": params["scale"], **params["embed"]}, RECIPES["current"])
    assert isinstance(one_rule["kernel"], QuantizedWeight)


@pytest.mark.parametrize("casts", [None, pytest.param("mosaic", marks=needs_mosaic)])
def test_kernels_of_a_chip(casts):
    """A matmul of a weight in FP8 has one cast kernel less. The cast before it is XLA's."""
    recipe = RECIPES["delayed"]
    shapes = (4096, 1024), (1024, 512)

    def program(way):
        def step(x, w, state):
            params = held(way, {"w": w}, recipe, state)
            loss = lambda params, state: jnp.sum(
                dot(x, params["w"], recipe, state, kernels=fp8.Kernels("h200", casts=casts))
            )
            return fp8.value_and_grad(loss)(params, state)

        arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        # Each cast kernel is partitioned over the mesh by a rule of its own.
        return count(jax.make_jaxpr(step)(*arrays, init(recipe)).jaxpr, "custom_partitioning")

    kernels = program("plain") // 3
    assert program("plain") == 3 * kernels
    assert program("primary") == 2 * kernels
    assert (kernels > 0) == (casts is not None)


def test_hard_values():
    """NaN, infinity and zero in the weight give what they give without `quantize_params`."""
    for value in (jnp.nan, jnp.inf, 0.0):
        for name in ("current", "mxfp8"):
            w = normal(0, K, N).at[3].set(value) if value else jnp.zeros((K, N))
            run = lambda way, w, name=name: fp8.value_and_grad(
                lambda params, _: jnp.sum(dot(normal(1, M, K), params["w"], RECIPES[name], ()))
            )(held(way, {"w": w}, RECIPES[name]), ())
            chex.assert_trees_all_equal(run("primary", w), run("plain", w))
