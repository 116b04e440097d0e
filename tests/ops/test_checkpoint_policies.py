"""`save_fp8_residuals`: what is saved, and what the backward pass casts a second time."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise_hp_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "static": fp8.recipes.static(x_scale=0.1, w_scale=0.1, g_scale=0.1),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8_2d": fp8.recipes.mxfp8(w_tile_dim=2),
}
# x and w once (or once for each matmul that reads other rows or tiles of it), g likewise.
CASTS = {
    "delayed": 3,
    "current": 3,
    "rowwise": 6,
    "rowwise_hp_wgrad": 4,
    "static": 3,
    "blockwise": 5,
    "mxfp8": 6,
    "mxfp8_2d": 5,
}
# Of these, the matmul of fprop reads a copy of x, or of w, that no other matmul reads.
APART = {
    "x": {"rowwise", "rowwise_hp_wgrad", "blockwise", "mxfp8", "mxfp8_2d"},
    "w": {"rowwise", "rowwise_hp_wgrad", "mxfp8"},
}
POLICIES = {
    "none": lambda block: block,
    "fp8": lambda block: jax.checkpoint(block, policy=fp8.save_fp8_residuals()),
    "weights": lambda block: jax.checkpoint(block, policy=fp8.save_fp8_residuals(weights=True)),
    "everything": jax.checkpoint,
}
LAYERS = 2
VALUES = [format.dtype.name for format in (fp8.E4M3, fp8.E5M2)]  # a scale in E8M0 is made of bits


def program(recipe, policy):
    """The traced step of LAYERS blocks whose nonlinearity needs y again in the backward pass."""
    state = fp8.init_state(recipe)
    w = jnp.ones((LAYERS, 4, 4))

    def loss(w, s, x):
        for i in range(LAYERS):
            x = POLICIES[policy](lambda w, s, x: jnp.tanh(fp8.dot(x, w, recipe=recipe, state=s)))(
                w[i], s, x
            )
        return jnp.sum(x)

    return jax.make_jaxpr(fp8.value_and_grad(loss))(w, state, jnp.ones((8, 4)))


def casts(jaxpr):
    """The number of casts to FP8, in all subprograms."""
    makers = {var: e.primitive.name for e in jaxpr.eqns for var in e.outvars}

    def is_cast(e):
        """A byte of FP8 that is made here.

        What is saved has the same bitcast, of a byte that has a name.
        """
        if e.primitive.name != "bitcast_convert_type" or e.params["new_dtype"].name not in VALUES:
            return False
        return makers.get(e.invars[0]) == "convert_element_type"

    parameters = [
        p
        for e in jaxpr.eqns
        for p in jax.tree.leaves(list(e.params.values()), is_leaf=lambda n: hasattr(n, "eqns"))
    ]
    return sum(map(is_cast, jaxpr.eqns)) + sum(casts(p) for p in parameters if hasattr(p, "eqns"))


# The others have the quantizers of one of these, or none that reads other rows or tiles.
FEW = "delayed", "rowwise", "rowwise_hp_wgrad", "blockwise", "mxfp8_2d"


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in RECIPES],
)
def test_what_is_cast_twice(recipe):
    """Copies that fprop alone reads. Without copies of w, one of them: the forward pass needs none
    for dgrad.
    """
    cast, apart = CASTS[recipe] * LAYERS, {t: LAYERS * (recipe in of) for t, of in APART.items()}
    assert casts(program(RECIPES[recipe], "none")) == cast
    assert casts(program(RECIPES[recipe], "weights")) == cast + apart["x"] + apart["w"]
    assert casts(program(RECIPES[recipe], "fp8")) == cast + apart["x"] + LAYERS


@pytest.mark.parametrize(
    "recipe",
    [
        # With state, and of tiles.
        pytest.param(name, marks=() if name in ("delayed", "blockwise") else pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_plain_remat_casts_again(recipe):
    """The count can fail."""
    assert casts(program(RECIPES[recipe], "everything")) > CASTS[recipe] * LAYERS


@functools.cache
def gradients(recipe, *policy, jit=True):
    """Loss and gradients of two blocks, without jax.checkpoint or with it and a policy."""
    x, w = jnp.arange(-16.0, 16.0).reshape(8, 4) * 28, jnp.arange(-8.0, 8.0).reshape(4, 4) * 56
    block = lambda x, w: jnp.maximum(fp8.dot(x, w, recipe=recipe), 0)
    if policy:
        block = jax.checkpoint(block, policy=policy[0])
    step = jax.value_and_grad(lambda x, w: jnp.sum(block(block(x, w), w)), (0, 1))
    with contextlib.nullcontext() if jit else jax.disable_jit():
        return jax.jit(step)(x, w)


JAXS_POLICIES = {
    "fp8": fp8.save_fp8_residuals(),
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "anything_except": jax.checkpoint_policies.save_anything_except_these_names("other"),
    "nothing": jax.checkpoint_policies.nothing_saveable,
}
# Ours, and one of JAX's. What it saves without a name is the same for all recipes.
SELDOM = {
    ("current", "fp8"),
    ("current", "everything"),
    ("mxfp8", "everything"),
    ("mxfp8", "dots"),
    ("current", "anything_except"),
    ("mxfp8", "anything_except"),
    ("mxfp8", "nothing"),
    ("current", "nothing"),
}


@pytest.mark.parametrize(
    ("recipe", "policy"),
    [
        pytest.param(
            recipe,
            policy,
            id=f"{recipe.name}-{name}",
            marks=pytest.mark.slow if (recipe.name, name) in SELDOM else (),
        )
        for recipe in (fp8.recipes.current(power_of_two=True), fp8.recipes.mxfp8())
        for name, policy in JAXS_POLICIES.items()
    ],
)
def test_every_policy_gives_the_gradients_of_none(recipe, policy):
    """Saved values reach 448.

    Jax.checkpoint's reduce_precision would make NaN of E4M3FN above 240.
    """
    want, got = gradients(recipe), gradients(recipe, policy)
    chex.assert_tree_all_finite(want)
    chex.assert_trees_all_equal(got, want, strict=True)


@pytest.mark.parametrize("name", ["fp8", "everything"])
def test_policies_without_jit(name):
    """Then jax.checkpoint sees what is read inside of a matmul."""
    recipe = fp8.recipes.current(power_of_two=True)
    got = gradients(recipe, JAXS_POLICIES[name], jit=False)
    chex.assert_trees_all_equal(got, gradients(recipe, jit=False), strict=True)


def saved(**options):
    """What is saved for a block whose y nobody needs again, without scalars and arguments."""
    recipe = fp8.recipes.current()
    block = jax.checkpoint(
        lambda x, w: fp8.dot(jnp.sin(x), w, recipe=recipe),
        policy=fp8.save_fp8_residuals(**options),
    )
    kept = jax.tree.leaves(
        jax.eval_shape(lambda *args: jax.vjp(block, *args)[1], jnp.ones((8, 4)), jnp.ones((4, 4)))
    )
    names = [f"{aval.dtype}{list(aval.shape)}" for aval in kept if aval.ndim]
    return {name for name in names if name not in ("float32[4, 4]", "float32[8, 4]")}


def test_what_a_linear_block_keeps():
    assert saved() == {"float8_e4m3fn[8, 4]"}
    assert saved(weights=True) == {"float8_e4m3fn[8, 4]", "float8_e4m3fn[4, 4]"}
    assert saved(inputs=False) == set()


@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        *(
            (name, "float8_e4m3fn[128, 128]")
            for name in ("delayed", "current", "rowwise", "blockwise")
        ),
        ("mxfp8", "float8_e4m3fn[128, 128]"),
        ("rowwise_hp_wgrad", "float32[128, 128]"),
    ],
)
def test_one_copy_is_saved(recipe, values):
    """Also if fprop runs again and reads another one."""
    state = fp8.freeze(fp8.init_state(RECIPES[recipe]))

    def block(x, w):
        return jnp.tanh(fp8.dot(jnp.sin(x), w, recipe=RECIPES[recipe], state=state))

    def residuals(x, w):
        block_ = jax.checkpoint(block, policy=fp8.save_fp8_residuals())
        return jax.tree.leaves(jax.vjp(block_, x, w)[1])

    jaxpr = jax.make_jaxpr(residuals)(jnp.ones((128, 128)), jnp.ones((128, 128))).jaxpr
    made = [v.aval for v in jaxpr.outvars if v not in jaxpr.invars]
    assert [f"{a.dtype}{list(a.shape)}" for a in made if a.size >= 128 * 128] == [values]


@pytest.mark.parametrize("name", ["inputs", "weights"])
def test_arguments_are_bools(name):
    with pytest.raises(TypeError, match=f"{name}=1 must be True or False"):
        fp8.save_fp8_residuals(**{name: 1})


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_a_second_cast_finds_no_amax(recipe):
    """Without copies of x and w, their amaxes are saved: no tensor is read for a second amax."""

    def maxima(policy):
        def loss(x, w):
            block = lambda x: jnp.tanh(fp8.dot(x, w, recipe=RECIPES[recipe]))
            return jnp.sum(block(x) if policy is None else jax.checkpoint(block, policy=policy)(x))

        x, w = jnp.ones((8, 128)), jnp.ones((128, 16))
        return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)).count("reduce_max")

    once = maxima(None)
    assert maxima(fp8.save_fp8_residuals()) == once
    assert maxima(fp8.save_fp8_residuals(inputs=False)) == once
    assert maxima(jax.checkpoint_policies.nothing_saveable) > once
