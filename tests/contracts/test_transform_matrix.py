"""The transform matrix.

Every JAX transformation x recipe x face gives the amaxes, scales and gradients of a plain loop.

The true amaxes are told by the running program itself; integers have one maximum. Rows in BOUNDED
add several uses of a state up in one sum of ledgers: never below the truth, at most 1/8 above, the
very same scale if that is a power of two.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import rows_local, rows_mesh
from contracts.faces import FACES, RECIPES, core
from contracts.truth import Truth

import jaxfp8 as fp8
from jaxfp8.state._state import SeenAmax

# The rest of the product says little that is new and takes minutes.
DEFAULT = {("delayed", "core")}
ALSO = {
    "jitted": {
        (recipe, face)
        for recipe in RECIPES
        for face in FACES
        if face == "core" or recipe in ("delayed", "own")
    },
    "experts": {("own", "core")},
    "remat": {("rowwise", "core")},
    "remat_in_scan": {("own", "core")},
    "vmap_examples": {("current", "core")},
    "tied": {("delayed_pow2", "core"), ("own", "core")},
    "shard_map_inside_vma": {("current", "core"), ("rowwise", "core"), ("delayed", "linen")},
    "shard_map_outside_no_vma": {("delayed_pow2", "core"), ("own", "core")},
    "stages_inside_vma": {("own", "core")},
    "explicit_data_tensor": {
        ("own", "core"),
        ("rowwise", "core"),
        ("blockwise", "core"),
        ("delayed", "nnx"),
    },
    "shard_map_inside_no_vma": {("mxfp8", "core")},
    "shard_map_tensor_vma": {("blockwise", "core")},
}

# Of these the table has another row of that transformation, and another one of that recipe or face.
# Without a state a `jitted` row compares a function with itself.
SELDOM = {
    *(("jitted", recipe, "core") for recipe in RECIPES if not RECIPES[recipe].rows),
    ("jitted", "own", "linen"),
    ("jitted", "own", "nnx"),
    ("remat", "rowwise", "core"),
    ("remat_in_scan", "own", "core"),
    ("tied", "own", "core"),
    ("shard_map_outside_no_vma", "own", "core"),
    ("stages_inside_vma", "own", "core"),
    ("explicit_data_tensor", "delayed", "core"),
    ("explicit_data_tensor", "own", "core"),
    ("eager", "delayed", "core"),
    ("jitted", "delayed_pow2", "core"),
    ("remat", "delayed", "core"),
    ("tied", "delayed_pow2", "core"),
    ("jitted", "delayed", "linen"),
    ("jitted", "delayed", "nnx"),
    ("scan", "delayed", "core"),
    ("experts", "own", "core"),
    ("vmap_scan", "delayed", "core"),
}

# Rows that leave a device a part of a tile (one example of two), which then has a scale of its own.
CUTTING = {"shard_map_outside_vma", "shard_map_outside_no_vma"}
# Float32 scales of tiles along an axis that an Explicit mesh splits, that of wgrad: refused
# (test_scaled_matmul_tiles.py).
REFUSED = {"explicit_data", "explicit_data_tensor", "explicit_scan", "explicit_experts"}
LAYER_RECIPES = ("delayed", "rowwise")  # with state and without
# What differs from another recipe in its scales only, and layers, which hand their recipe and state
# on: one row of each kind.
FEW = {
    (recipe, "core")
    for recipe in (
        "delayed_pow2",
        "rowwise_hp_wgrad",
        "mxfp8",
        "mxfp8_2d",
        "blockwise_f32",
        "static",
        "identity",
    )
}
FEW |= {(recipe, face) for recipe in LAYER_RECIPES for face in ("linen", "nnx")}
KINDS = {
    "eager",
    "jitted",
    "remat_in_scan",
    "vmap_examples",
    "experts",
    "auto_data_tensor",
    "explicit_scan",
    "explicit_data_tensor",
    "shard_map_tensor_vma",
    "shard_map_inside_no_vma",
    "stages_inside_vma",
}


EXACT = [*rows_local.EXACT, *rows_mesh.EXACT]
BOUNDED = [*rows_local.BOUNDED, *rows_mesh.BOUNDED]
ON_MESH = [*rows_mesh.EXACT, *rows_mesh.BOUNDED]


def table(rows):
    for row in rows:
        for face in FACES:
            for recipe in RECIPES:
                if (
                    row.__name__.endswith("no_vma")
                    and not RECIPES[recipe].rows
                    and not RECIPES[recipe].tile
                ):
                    # without types a stateless amax is refused, or local by row (docs/limits.md)
                    continue
                if "contracted" in row.__name__ and ("by_row" in row.__name__) != recipe.startswith(
                    "rowwise"
                ):
                    continue
                if RECIPES[recipe].tile and row.__name__ in CUTTING | (
                    REFUSED if recipe == "blockwise_f32" else set()
                ):
                    continue
                usual = DEFAULT if row not in ON_MESH or row.__name__ in KINDS else set()
                wanted = (recipe, face) in usual | ALSO.get(row.__name__, set())
                if not wanted and face != "core" and recipe not in LAYER_RECIPES:
                    # a layer hands its recipe on to the core function: two recipes show that it
                    # does
                    continue
                # delayed_pow2 is exact there, by its power of two.
                told = row.__name__ in KINDS or (recipe == "delayed_pow2" and row in BOUNDED)
                if not wanted and (recipe, face) in FEW and not told:
                    continue
                default = wanted and (row.__name__, recipe, face) not in SELDOM
                marks = () if default else (pytest.mark.slow,)
                yield pytest.param(
                    row, recipe, face, id=f"{row.__name__}-{recipe}-{face}", marks=marks
                )


# One program each: eagerly each operation is one, for each shape.
commit = jax.jit(fp8.commit)


@functools.cache
def plain(recipe_name):
    """One matmul of the loops: the programs that all rows of a recipe share."""
    return jax.jit(core(RECIPES[recipe_name]).apply)


def check(build, recipe_name, face_name, *, exact, tolerance=2e-6):
    recipe, truth = RECIPES[recipe_name], Truth()
    face = FACES[face_name](recipe)
    row = build(face, truth.watch(face.apply), plain(recipe_name))
    step, reference = jax.jit(row.step) if row.jit else row.step, jax.value_and_grad(row.reference)
    for warm in (False, True) if recipe.rows else (False,):
        state = face.state(row.lead, warm)
        truth.largest.clear()
        with contextlib.nullcontext() if row.mesh is None else jax.set_mesh(row.mesh):
            loss, grads, new = step(*placed(row, state))
        true = truth.amax(row.lead) if row.truth is None else row.truth
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
        if recipe.rows:
            check_state(state, new, true, exact=exact)
        # NumPy's slices are no programs.
        frozen, *batch = jax.tree.map(np.asarray, (fp8.freeze(state), *row.batch))
        want_loss, want_grads = reference(row.w, frozen, *batch)
        w, want_grads = np.asarray(row.w), np.asarray(want_grads)
        # A loss is a sum of terms that cancel; their size is that of w * dw.
        np.testing.assert_allclose(
            loss, want_loss, rtol=tolerance, atol=tolerance * np.sum(np.abs(w * want_grads))
        )
        np.testing.assert_allclose(
            grads, want_grads, rtol=tolerance, atol=tolerance * np.max(np.abs(want_grads))
        )


def placed(row, state):
    if row.mesh is None:
        return row.w, state, *row.batch
    put = lambda value, spec: jax.device_put(value, jax.NamedSharding(row.mesh, spec))
    w, *batch = map(put, (row.w, *row.batch), row.specs)
    return w, state if row.state_spec is None else put(state, row.state_spec), *batch


def check_state(state, new, true, *, exact):
    want = commit(state, SeenAmax(jax.device_put(true), state.rows))
    if exact:
        np.testing.assert_array_equal(new.amax_history, want.amax_history)
    else:
        newest, least = (np.asarray(s.amax_history[..., -1]) for s in (new, want))
        assert (newest >= least).all()
        assert (newest <= np.float32(1.125) * least).all(), (newest, least)
    if exact or state.rows[0].quantizer.has_exact_scales:
        np.testing.assert_array_equal(new.scale, want.scale)
    np.testing.assert_array_equal(new.nonfinite_steps, 0.0)


@pytest.mark.parametrize(("row", "recipe", "face"), list(table(EXACT)))
def test_exact(row, recipe, face):
    check(row, recipe, face, exact=True)


@pytest.mark.parametrize(("row", "recipe", "face"), list(table(BOUNDED)))
def test_bounded(row, recipe, face):
    check(row, recipe, face, exact=False)
