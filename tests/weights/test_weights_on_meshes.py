"""Weights in FP8 on meshes: the FP8 values of one device, and no weight is moved for the cast."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.ops._quantize_params import _quantize_weight, requantize
from jaxfp8.sharding import Shard
from jaxfp8.weights import WeightAxes

RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "current": fp8.recipes.current(),
    "mxfp8_2d": fp8.recipes.mxfp8(w_tile_dim=2),
}
KINDS = ("auto", "explicit", "manual")
# Each shard ends where a tile of 128 does. "stack" has two layers.
K, N = 256, 128
SHAPES = {"a": (K, N), "b": (K, N), "c": (K, N), "stack": (2, K, N)}
SPLIT = Shard(0, "fsdp")
AXES = {name: WeightAxes(stacked=len(shape) - 2, shard=SPLIT) for name, shape in SHAPES.items()}
SPECS = {name: P(*[None] * (len(shape) - 2), "fsdp") for name, shape in SHAPES.items()}


def mesh_of(kind):
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh((2,), ("fsdp",), axis_types=(axis,), devices=jax.devices()[:2])


@functools.cache
def weights():
    random = np.random.default_rng(0)
    # The second half is larger: each shard has another amax.
    size = np.where(np.arange(K) < K // 2, 1, 3)[:, None]
    return {
        name: (random.standard_normal(shape) * size).astype(jnp.bfloat16)
        for name, shape in SHAPES.items()
    }


def states(recipe):
    if not recipe.rows:
        return ()
    state = jax.device_get(fp8.init_state(recipe))
    return {
        name: jax.tree.map(
            lambda a, s=shape: np.array(np.broadcast_to(a, (*s[:-2], *a.shape))), state
        )
        for name, shape in SHAPES.items()
    }


def quantize(recipe, params, state, axes=AXES):
    rules = [(name, axes[name]) for name in params]
    return fp8.quantize_params(params, recipe, rules=rules, state=state, primary=True)


@functools.cache
def on_one_device(name):
    axes = {key: dataclasses.replace(each, shard=None) for key, each in AXES.items()}
    cast = functools.partial(quantize, RECIPES[name], axes=axes)
    return jax.jit(cast)(weights(), states(RECIPES[name]))


def specs_of(name):
    return {
        key: dataclasses.replace(weight.specs(SPECS[key]), axes=AXES[key])
        for key, weight in on_one_device(name).items()
    }


def on_mesh(recipe, kind):
    """The compiled cast of all weights, and its arguments. A mesh must be set."""
    mesh = jax.sharding.get_mesh()
    params = jax.device_put(weights(), {k: NamedSharding(mesh, s) for k, s in SPECS.items()})
    cast = functools.partial(quantize, RECIPES[recipe])
    if kind == "manual":
        cast = jax.shard_map(cast, in_specs=(SPECS, P()), out_specs=specs_of(recipe))
    return jax.jit(cast).lower(params, states(RECIPES[recipe])).compile(), params


def collectives(program):
    """The names of collectives of a program, and the shapes that each one moves."""
    return re.findall(r"= (.*?) (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(",
                      program.as_text())  # fmt: skip


def cells(few):
    return [
        pytest.param(*cell, marks=() if cell in few else pytest.mark.slow)
        for cell in itertools.product(RECIPES, KINDS)
    ]


FEW = [("delayed", "explicit"), ("mxfp8", "auto"), ("rowwise", "manual")]


@pytest.mark.parametrize(("recipe", "kind"), cells(FEW))
def test_same_values(recipe, kind):
    """Values, scales and amaxes of one device. All amaxes are in one all-reduce.

    No weight is gathered. The results are split as `specs` says.
    """
    want = jax.device_get(on_one_device(recipe))
    with jax.set_mesh(mesh_of(kind)):
        program, params = on_mesh(recipe, kind)
        got = program(params, states(RECIPES[recipe]))
        assert_same_bits(jax.device_get(got), want)
        moved = collectives(program)
        assert {name for _, name in moved} <= {"all-reduce"}
        assert len(moved) == (0 if RECIPES[recipe].tile else 1)
        for shapes, _ in moved:  # an amax, or one for each column; never a weight
            sizes = [
                math.prod(map(int, filter(None, dims.split(","))))
                for dims in re.findall(r"\[(.*?)\]", shapes)
            ]
            assert sizes
            assert max(sizes) <= 2 * N
        for weight, spec in zip(got.values(), specs_of(recipe).values(), strict=True):
            leaves = (
                jax.tree.leaves(weight),
                jax.tree.leaves(spec, is_leaf=lambda n: isinstance(n, P)),
            )
            for leaf, each in zip(*leaves, strict=True):
                assert leaf.sharding.is_equivalent_to(
                    NamedSharding(jax.sharding.get_mesh(), each), leaf.ndim
                )


def test_specs():
    """Each axis of a scale follows the axis of the weight that it scales."""
    shape = jax.ShapeDtypeStruct((3, 4, 64, 256), jnp.bfloat16)
    axes = WeightAxes(contracted=(0, 1), stacked=1)

    def specs(recipe, spec):
        state = {}
        if recipe.rows:
            state["w"] = jax.tree.map(lambda a: jnp.stack([a] * 3), fp8.init_state(recipe))
        quantized = jax.eval_shape(
            lambda w: fp8.quantize_params(
                {"w": w}, recipe, rules=[("w", axes)], state=state, primary=True
            ),
            shape,
        )["w"]
        return quantized.specs(spec)

    spec = P("pipe", "fsdp", None, "tensor")
    blockwise = specs(RECIPES["blockwise"], spec)
    assert blockwise.values == (spec,)
    assert blockwise.scales == (P("pipe", "fsdp", "tensor"),)  # of merged heads [256, 256]
    assert specs(RECIPES["mxfp8"], spec).scales == (spec,) * 2  # a head is two tiles
    delayed = specs(RECIPES["delayed"], P("pipe"))
    assert delayed.scales == (P("pipe"),)
    assert delayed.amaxes == P("pipe")
    # A scale for each column, and one for each row.
    assert specs(RECIPES["rowwise"], spec).scales == (
        P("pipe", None, None, "tensor"), P("pipe", "fsdp", None, None),
    )  # fmt: skip


# A layer whose weight is split by FSDP. x is split by the batch.
@pytest.mark.parametrize(
    ("recipe", "kind"),
    cells([("delayed", "manual"), ("mxfp8", "explicit"), ("rowwise", "manual")]),
)
def test_training(recipe, kind):
    """Gradients and state of weights in bfloat16 that each step casts."""
    name, recipe = recipe, RECIPES[recipe]
    mesh = mesh_of(kind)
    random = np.random.default_rng(5)
    x, c = (random.standard_normal((256, size)).astype(jnp.bfloat16) for size in (K, N))
    split = P("fsdp")
    params, state = {"a": weights()["a"]}, {"a": fp8.init_state(recipe)} if recipe.rows else ()

    def loss(params, state, x, c):
        y = fp8.dot(
            x, params["a"], recipe=recipe, state=state["a"] if recipe.rows else None,
            w_shard=SPLIT, out_sharding=split if kind == "explicit" else None,
        )  # fmt: skip
        total = jnp.sum((y * c).astype(jnp.float32))
        return lax.psum(total, "fsdp") if kind == "manual" else total

    def two_steps(in_fp8, params, state, x, c):
        found = []
        for i in range(2):
            values = {"a": params["a"] * (i + 1)}
            given = quantize(recipe, values, state) if in_fp8 else values
            _, grads, state = fp8.value_and_grad(loss)(given, state, x, c)
            found.append((grads, state))
        return found

    with jax.set_mesh(mesh):
        arrays = jax.device_put(
            (params, state, x, c),
            jax.tree.map(
                functools.partial(NamedSharding, mesh), ({"a": split}, P(), split, split)
            ),
        )  # fmt: skip
        results = []
        for in_fp8 in (False, True):
            step = functools.partial(two_steps, in_fp8)
            if kind == "manual":
                step = jax.shard_map(
                    step, in_specs=({"a": split}, P(), split, split),
                    out_specs=[({"a": split}, P())] * 2,
                )  # fmt: skip
            results.append(jax.device_get(jax.jit(step)(*arrays)))
    assert_same_bits(*results)
    assert name


def test_a_weight_in_rows_needs_its_shard():
    """Types do not say whether a mesh axis splits the rows that a scale belongs to."""
    axes = {"a": dataclasses.replace(AXES["a"], shard=None)}

    def cast(w):
        return quantize(RECIPES["rowwise"], {"a": w}, (), axes)["a"].scales[0]

    with jax.set_mesh(mesh_of("manual")):
        inside = jax.shard_map(cast, in_specs=P("fsdp"), out_specs=P("fsdp"))
        with pytest.raises(ValueError, match=r"a varies over .*WeightAxes\(shard=\.\.\.\)"):
            jax.eval_shape(inside, jax.ShapeDtypeStruct((K, N), jnp.bfloat16))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("axes", "scales"),
    [((), (1 / 448, 3 / 448)), (("stage",), (3 / 448, 3 / 448)), (None, (3 / 448, 3 / 448))],
)
def test_stages_have_scales_of_their_own(axes, scales, check_vma):
    """And keep them when the optimizer casts the weight again."""
    if axes is None and not check_vma:
        pytest.skip("without types the axes have to be named: the next test")
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    w = np.stack([np.full((4, 8), size, np.float32) for size in (1, 3)])  # a stage each
    rules = [("w", WeightAxes(reduce_axes=axes))]

    def cast(w):
        weight = fp8.quantize_params({"w": w[0]}, RECIPES["current"], rules=rules, primary=True)
        again = requantize(weight["w"], w[0])
        return jnp.stack([weight["w"].scales[0], again.scales[0]])[None] + 0 * w[:, 0, :2]

    inside = jax.shard_map(
        cast, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), check_vma=check_vma
    )
    assert_same_bits(jax.jit(inside)(w), np.array([[s, s] for s in scales], np.float32))


def test_without_types_the_axes_have_to_be_named():
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    cast = lambda w: fp8.quantize_params({"w": w}, RECIPES["current"], rules=[("w", WeightAxes())])
    inside = jax.shard_map(
        cast, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), check_vma=False
    )
    with pytest.raises(fp8.FP8StateError, match="reduce_axes"):
        jax.eval_shape(inside, jax.ShapeDtypeStruct((4, 8), jnp.float32))


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_one_layer_of_a_stack_is_cast_again(recipe):
    """As an optimizer does that runs in a loop over layers."""
    cast = jax.jit(
        lambda w: _quantize_weight(w, RECIPES[recipe], WeightAxes(stacked=1), primary=True)
    )
    w = weights()["stack"]
    twice = (2 * w.astype(np.float32)).astype(w.dtype)
    stacked = cast(w)
    layers = jax.jit(lambda *pair: jax.lax.map(lambda pair: requantize(*pair), pair))(
        stacked, twice
    )
    assert_same_bits(layers, cast(twice))
    assert layers.stacked == 1
    assert jax.tree.map(lambda a: a[0], jax.device_get(stacked)).stacked == 0
