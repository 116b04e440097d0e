"""Inside shard_map.

`reduce_axes=` where types do not decide, and cases where it cannot decide either.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hard_inputs import mentions
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.linen import FP8Dense
from jaxfp8.nnx import FP8Linear

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 64)).astype(np.float32)
W = rng.normal(size=(64, 16)).astype(np.float32)


def mesh(*names):
    return jax.make_mesh((2, 2), names, axis_types=(AxisType.Auto,) * 2)


def value_and_grads(x, w, **arguments):
    y, pullback = jax.vjp(lambda x, w: fp8.dot(x, w, **arguments), x, w)
    return y, *pullback(jnp.cos(y))


@pytest.mark.parametrize(("named", "own"), [(("data",), True), (None, False)])
def test_stages_without_state_keep_their_amaxes(named, own):
    """Amaxes 100 times apart.

    By default types cannot tell a stage from a shard, and the smaller one pays for it.
    """
    recipe = fp8.recipes.current()
    stages = [(X, W), (X / 100, W / 100)]
    alone = [jax.jit(lambda x, w: value_and_grads(x, w, recipe=recipe))(*stage) for stage in stages]

    def local(x, w):
        return tuple(t[None] for t in value_and_grads(x[0], w[0], recipe=recipe, reduce_axes=named))

    lie = P("pipe", "data"), P("pipe")
    step = jax.shard_map(
        local, mesh=mesh("pipe", "data"), in_specs=lie, out_specs=(P("pipe", "data"), *lie)
    )
    xs, ws = (np.stack(tensors) for tensors in zip(*stages, strict=True))
    for together, *apart in zip(jax.jit(step)(xs, ws), *alone, strict=True):
        same = [
            np.allclose(together[i], apart[i], rtol=1e-5, atol=1e-6 * np.abs(apart[i]).max())
            for i in (0, 1)
        ]
        assert same == [True, own]


@pytest.mark.parametrize(("named", "whole"), [(("data", "tensor"), True), (None, False)])
def test_rows_that_a_contraction_splits(named, whole):
    """Half of each row of x and of each column of w is large."""
    recipe = fp8.recipes.rowwise()
    x, w = X.copy(), W.copy()
    x[:, :32] *= 64
    w[32:] *= 64
    want = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe))(x, w)

    def local(x, w):
        return lax.psum(fp8.dot(x, w, recipe=recipe, reduce_axes=named), "tensor")

    step = jax.shard_map(
        local,
        mesh=mesh("data", "tensor"),
        in_specs=(P("data", "tensor"), P("tensor")),
        out_specs=P("data"),
    )
    assert (
        np.allclose(jax.jit(step)(x, w), want, rtol=1e-6, atol=1e-6 * np.abs(want).max()) == whole
    )


@pytest.mark.parametrize("named", [(), pytest.param(None, marks=pytest.mark.slow)])
def test_what_types_tell_needs_no_name(named):
    """x varies along "data" and w does not: no stage."""
    recipe = fp8.recipes.current()
    want = jax.jit(lambda x, w: value_and_grads(x, w, recipe=recipe))(X, W)
    run = lambda x, w: value_and_grads(x, w, recipe=recipe, reduce_axes=named)
    lie = P(("data", "tensor")), P()
    step = jax.shard_map(run, mesh=mesh("data", "tensor"), in_specs=lie, out_specs=(lie[0], *lie))
    for mine, theirs in zip(jax.jit(step)(X, W), want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6 * np.abs(theirs).max())


def test_a_part_says_its_axis_itself():
    """Without types, the amax of a sharded w that a state follows spans its shards."""
    recipe = fp8.recipes.delayed()
    state = fp8.init_state(recipe)

    def local(x, w, state):
        loss = lambda w, state: jnp.sum(
            fp8.dot(x, w, recipe=recipe, state=state, w_shard=fp8.sharding.Shard(0, "fsdp"))
        )
        state = fp8.value_and_grad(loss, reduce_axes=("data",))(w, state)[-1]
        return jax.tree.map(lambda leaf: leaf[None, None], state)

    step = jax.shard_map(
        local,
        mesh=mesh("data", "fsdp"),
        in_specs=(P("data"), P("fsdp"), P()),
        out_specs=P("data", "fsdp"),
        check_vma=False,
    )
    rising = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    amaxes = jax.jit(step)(X, rising, state).amax_history[..., 1, -1]  # of w on each device
    np.testing.assert_array_equal(amaxes, np.full((2, 2), 64 * 16 - 1))


def test_wrong_names():
    dot = lambda **named: fp8.dot(X, W, recipe=fp8.recipes.current(), **named)
    with pytest.raises(TypeError, match=r"reduce_axes='data'.*write \('data',\)"):
        dot(reduce_axes="data")
    with (
        jax.set_mesh(mesh("data", "tensor")),
        pytest.raises(fp8.FP8StateError, match=r"'dat'.*'data'"),
    ):
        dot(reduce_axes=("dat",))
    with (
        jax.set_mesh(mesh("data", "tensor")),
        pytest.raises(fp8.FP8StateError, match=r"'dat'.*'data'"),
    ):
        fp8.value_and_grad(lambda w, s: jnp.sum(w), reduce_axes=("dat",))(
            W, fp8.init_state(fp8.recipes.delayed())
        )
    dot(reduce_axes=("data",))  # no mesh: a layer made for one, as flax initializes it


ROWWISE = {
    "rowwise": fp8.recipes.rowwise(),
    "float32 scales": fp8.recipes.rowwise(power_of_two=False),
    "high precision": fp8.recipes.rowwise(high_precision_wgrad=True),
}
ROWS = fp8.quantizers.Current(format=fp8.E4M3, granularity=fp8.quantizers.PerRow())
MIXED = fp8.Recipe(
    name="rows and states",
    fprop=fp8.recipes.Operands(lhs=fp8.quantizers.Delayed(format=fp8.E4M3), rhs=ROWS),
    dgrad=fp8.recipes.Operands(lhs=ROWS, rhs=ROWS),
    wgrad=fp8.recipes.Operands(lhs=ROWS, rhs=ROWS),
)


def split_contraction(recipe, named, *, vma):
    """y, and dx and dw for a given gradient of y, of x split over rows and columns."""

    def local(x, w, g):
        y, pull = jax.vjp(lambda x, w: fp8.dot(x, w, recipe=recipe, reduce_axes=named), x, w)
        dx, dw = pull(lax.pcast(g, ("tensor",), to="varying") if vma else g)
        # With types `dw` is summed already.
        return lax.psum(y, "tensor"), dx, dw if vma else lax.psum(dw, "data")

    specs = P("data", "tensor"), P("tensor"), P("data")
    return jax.shard_map(
        local,
        mesh=mesh("data", "tensor"),
        in_specs=specs,
        out_specs=(P("data"), *specs[:2]),
        check_vma=vma,
    )


@pytest.mark.parametrize(
    ("named", "vma", "y_differs", "dw_differs"),
    # (("data", "tensor"), False) raises now. It gave 2.7 % and 3.0 %, too: the axes were ignored.
    [
        (("data", "tensor"), True, 0, 0),
        (None, False, 0.0273, 0.0299),
        pytest.param((), False, 0.0273, 0.0299, marks=pytest.mark.slow),
    ],
)
def test_how_far_local_amaxes_of_rows_are_from_one_device(named, vma, y_differs, dw_differs):
    recipe, g = ROWWISE["float32 scales"], rng_gradient()
    dot = lambda x, w: fp8.dot(x, w, recipe=recipe)

    @jax.jit
    def whole(x, w, g):
        y, pull = jax.vjp(dot, x, w)
        return y, *pull(g)

    got = jax.jit(split_contraction(recipe, named, vma=vma))(X, W, g)
    differences = [
        float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
        for a, b in zip(got, whole(X, W, g), strict=True)
    ]
    np.testing.assert_allclose(differences, [y_differs, 0, dw_differs], atol=5e-4)


def rng_gradient():
    return np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)


@pytest.mark.parametrize("recipe", ROWWISE)
@pytest.mark.parametrize("named", [("data", "tensor"), ("tensor",)], ids=str)
def test_rows_ignore_no_axes(named, recipe):
    """Before, the two axes were accepted, and y was 2.7 % off with float32 scales (see above)."""
    step, recipe = split_contraction(ROWWISE[recipe], named, vma=False), ROWWISE[recipe]
    parts = f"reduce_axes={named}", f"recipe {recipe.name!r}", "row of x, w, g", "check_vma=True"
    with pytest.raises(fp8.FP8StateError, match=mentions(*parts)):
        jax.eval_shape(step, X, W, rng_gradient())


def test_which_cure_an_error_names():
    """Without names a recipe that has amaxes of tensors, too, is refused as before.

    They need them.
    """
    alone, both = ROWWISE["rowwise"], ROWWISE["high precision"]
    shapes = lambda recipe, named: jax.eval_shape(
        split_contraction(recipe, named, vma=False), X, W, rng_gradient()
    )
    for recipe, named, parts in (
        (alone, ("data",), ("row of x, w, g", "leave reduce_axes= out")),
        (both, ("data",), ("row of x, w, g", "Use check_vma=True")),
        (both, None, ("amaxes of tensors and of rows", "needs check_vma=True")),
    ):
        with pytest.raises(fp8.FP8StateError, match=mentions(*parts)) as error:
            shapes(recipe, named)
        assert ("leave reduce_axes= out" in str(error.value)) == (recipe == alone)
    assert shapes(both, ())[0].shape == (8, 16)


def test_rows_ignore_no_axes_of_value_and_grad():
    """It names the axes for the amaxes of x that a state follows.

    Those of rows would ignore them.
    """
    state = fp8.init_state(MIXED)
    loss = lambda w, state, x: jnp.sum(fp8.dot(x, w, recipe=MIXED, state=state))
    share = lambda step, **how: jax.shard_map(
        step, mesh=mesh("data", "tensor"), in_specs=(P(), P(), P("data")), out_specs=P(), **how
    )
    step = share(
        lambda *args: fp8.value_and_grad(loss, reduce_axes=("data",))(*args)[2], check_vma=False
    )
    with pytest.raises(
        fp8.FP8StateError,
        match=mentions("reduce_axes=('data',)", "'rows and states'", "check_vma=True"),
    ):
        jax.eval_shape(step, W, state, X)
    step = share(lambda *args: fp8.value_and_grad(loss)(*args)[2])
    new = jax.jit(step)(W, state, X)
    np.testing.assert_array_equal(new.amax_history[:, -1], np.max(np.abs(X)))


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(fp8.recipes.blockwise(), marks=pytest.mark.slow), fp8.recipes.mxfp8()],
    ids=lambda recipe: recipe.name,
)
def test_tiles_need_no_axes_and_take_them(recipe):
    """A tile lies on one device."""
    x, w = np.tile(X, (1, 4)), np.tile(W, (4, 1))  # K = 256: 128 for each device
    local = lambda x, w: lax.psum(
        fp8.dot(x, w, recipe=recipe, reduce_axes=("data", "tensor")), "tensor"
    )
    step = jax.shard_map(
        local,
        mesh=mesh("data", "tensor"),
        in_specs=(P("data", "tensor"), P("tensor")),
        out_specs=P("data"),
        check_vma=False,
    )
    want = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe))(x, w)
    np.testing.assert_allclose(jax.jit(step)(x, w), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_a_layer_for_shard_map_is_initialized_outside(library):
    """There no axis is manual, and arrays are whole."""
    how = {"recipe": fp8.recipes.rowwise(), "reduce_axes": ("data", "tensor")}
    if library == "linen":
        layer = FP8Dense(16, use_bias=False, **how)
        run = lambda params, x: layer.apply(params, x)
        params = jax.jit(layer.init)(jax.random.key(0), X)
    else:
        graph, params = nnx.split(FP8Linear(64, 16, use_bias=False, rngs=nnx.Rngs(0), **how))
        run = lambda params, x: nnx.merge(graph, params)(x)
    want = jax.jit(run)(params, X)
    share = lambda vma: jax.shard_map(
        run,
        mesh=mesh("data", "tensor"),
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=vma,
    )
    np.testing.assert_array_equal(jax.jit(share(True))(params, X), want)
    with pytest.raises(fp8.FP8StateError, match=mentions("'rowwise'", "check_vma=True")):
        jax.eval_shape(share(False), params, X)
