"""What is gathered in FP8 inside shard_map: the answer of one device, for every recipe.

The numbers are integers, so every sum is exact. Tiles have sides of 2, so shards of 2 hold whole
tiles.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.faces import RECIPES
from hard_inputs import mentions
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.programs import wire_report
from jaxfp8.sharding import Shard

AXES = ("data", "model")


def mesh():
    return jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def integers(seed, *shape):
    values = np.random.default_rng(seed).integers(-20, 21, shape).astype(np.float32)
    values[-1] *= 3  # the largest values lie on the last device, whatever is split
    values[..., -1] *= 2
    return values


X, W, C = integers(0, 16, 8), integers(1, 8, 16), integers(2, 16, 16)


def loss(recipe, x, w, state, c, **how):
    """The gradient of y is c; that of x leaves through a second result."""
    return jnp.sum(fp8.dot(x, w, recipe=recipe, state=state, **how) * c)


@functools.partial(jax.jit, static_argnums=0)
def _on_one_device(recipe, x, w, state, c):
    value, grads, new = fp8.value_and_grad(lambda xw, s: loss(recipe, *xw, s, c))((x, w), state)
    return value, *grads, new


def on_one_device(recipe, state):
    return _on_one_device(recipe, X, W, state, C)


# The specs of x, w and the gradient of y, which of them is gathered, and the axes over which the
# user sums gradients.
LAYOUTS = {
    "rows of w, fully sharded": (
        (P(AXES), P("model"), P(AXES)),
        {"w_shard": Shard(0, "model")},
        ((), ("data",)),
    ),
    "columns of w, fully sharded": (
        (P(AXES), P(None, "model"), P(AXES)),
        {"w_shard": Shard(-1, "model")},
        ((), ("data",)),
    ),
    "tokens over the columns of w": (
        (P(AXES), P(None, "model"), P("data", "model")),
        {"x_shard": Shard(0, "model")},
        ((), ("data",)),
    ),
    "a sum over the rows of w, scattered": (
        (P("data", "model"), P("model"), P(AXES)),
        {"y_shard": Shard(0, "model")},
        ((), ("data",)),
    ),
}


def sharded(recipe, specs, how, summed, *, vma):
    """The program of a step: of x, w, a state and the gradient of y."""
    x_spec, w_spec, c_spec = specs
    named = () if vma else AXES

    def local(x, w, state, c):
        reduce = {"reduce_axes": named} if named and recipe.rows else {}
        extra = {"reduce_axes": named} if named and not recipe.rows else {}
        run = fp8.value_and_grad(lambda xw, s: loss(recipe, *xw, s, c, **how, **extra), **reduce)
        value, (dx, dw), new = run((x, w), state)
        if not vma:
            dx, dw = (
                lax.psum(d, axes) if axes else d for d, axes in zip((dx, dw), summed, strict=True)
            )
        return lax.psum(value, AXES), dx, dw, new

    step = jax.shard_map(
        local,
        mesh=mesh(),
        in_specs=(x_spec, w_spec, P(), c_spec),
        out_specs=(P(), x_spec, w_spec, P()),
        check_vma=vma,
    )
    return jax.jit(step)


def cases():
    for layout in LAYOUTS:
        for recipe in RECIPES:
            for vma in (True, False):
                # Without types row amaxes stay local (docs/limits.md), and the others say the same
                # in one of each kind.
                if not vma and recipe not in ("delayed", "current", "blockwise", "mxfp8_2d"):
                    continue
                quick = vma and (layout, recipe) in {
                    ("rows of w, fully sharded", "delayed"),
                    ("columns of w, fully sharded", "current"),
                    ("tokens over the columns of w", "rowwise"),
                    ("a sum over the rows of w, scattered", "delayed"),
                }
                marks = () if quick else (pytest.mark.slow,)
                yield pytest.param(
                    layout,
                    recipe,
                    vma,
                    id=f"{layout}-{recipe}-{'vma' if vma else 'no_vma'}",
                    marks=marks,
                )


@pytest.mark.parametrize(("layout", "recipe", "vma"), list(cases()))
def test_is_the_answer_of_one_device(layout, recipe, vma):
    recipe = RECIPES[recipe]
    step = sharded(recipe, *LAYOUTS[layout], vma=vma)
    for state in (fp8.init_state(recipe), on_one_device(recipe, fp8.init_state(recipe))[-1]):
        want = on_one_device(recipe, state)
        got = step(X, W, state, C)
        for mine, theirs in zip(got[:3], want[:3], strict=True):
            # A loss is a sum of terms that cancel; their size is that of w * dw.
            size = np.sum(np.abs(W * want[2])) if mine.ndim == 0 else np.max(np.abs(theirs))
            np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6 * float(size))
        jax.tree.map(np.testing.assert_array_equal, got[3], want[3])
        if not recipe.rows:
            break


@pytest.mark.parametrize("inside", [False, True], ids=["Auto mesh", "shard_map"])
def test_a_weight_is_gathered_as_bytes(inside):
    """And the gradient is not gathered."""
    on = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    split, how = P("model"), {"recipe": fp8.recipes.current(), "w_shard": Shard(0, "model")}

    def local(x, w):
        step = jax.grad(lambda x, w: jnp.sum(jnp.square(fp8.dot(x, w, **how))), argnums=(0, 1))
        return step(x, w)

    step = jax.shard_map(local, in_specs=split, out_specs=split) if inside else local
    lay = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, split))
    with jax.set_mesh(on):
        report = wire_report(jax.jit(step).lower(lay(X), lay(W)).compile())
    gathered = {each.dtype for each in report.only(kind="all-gather").transfers}
    assert gathered == {"uint8"}, report


def permuted(w_shape, numbers, **how):
    """y of x [16, 128] and w in tiles: with w split over four devices, and on one device."""
    x, w = integers(0, 16, 128), integers(1, *w_shape)
    run = functools.partial(
        fp8.dot_general, dimension_numbers=(numbers, ((), ())), recipe=fp8.recipes.mxfp8()
    )
    axis = how["w_shard"].axis
    spec = P(*(None,) * axis, "model")
    sharded = jax.shard_map(
        functools.partial(run, **how), mesh=mesh(), in_specs=(P(AXES), spec), out_specs=P(AXES)
    )
    return jax.jit(sharded)(x, w), jax.jit(run)(x, w)


@pytest.mark.parametrize(
    ("w_shape", "numbers", "axis"),
    [
        ((128, 128), ((1,), (1,)), 0),
        ((128, 128), ((1,), (1,)), 1),
        ((8, 128, 32), ((1,), (1,)), 0),
    ],
)
def test_the_shard_follows_axes_that_tiles_permute_or_merge(w_shape, numbers, axis):
    got, want = permuted(w_shape, numbers, w_shard=Shard(axis, "model"))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_shard_of_an_axis_that_is_merged_into_another_is_refused():
    with pytest.raises(ValueError, match=mentions("axis 2", "is merged into the one before it")):
        permuted((128, 8, 16), ((1,), (0,)), w_shard=Shard(2, "model"))
