"""The copies that a mesh gathers: matmuls share one if they can, also in a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8._geometry import TrainingGeometry
from jaxfp8.recipes._recipe import plan_casts
from jaxfp8.sharding import Shard

MATMUL = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)


@pytest.mark.parametrize(
    ("recipe", "written", "gathered"),
    [("current", 2, 1), ("delayed", 2, 1), ("rowwise", 2, 2), ("blockwise", 2, 2), ("mxfp8", 2, 2)],
)
def test_a_kernel_that_writes_transposed_copies(recipe, written, gathered):
    """It writes one copy for each matmul. Two copies with one scale would double the bytes."""
    recipe = getattr(fp8.recipes, recipe)()

    def copies(gathered):
        planned = plan_casts(recipe, MATMUL, "g", ("mosaic", "xla"), gathered=gathered)
        return sum(len(each.readers) for each in planned)

    assert (copies(gathered=False), copies(gathered=True)) == (written, gathered)


# A layer that `jax.checkpoint` computes again: it gathers for fprop in both passes, and for dgrad.

rng = np.random.default_rng(0)
W, X = rng.normal(size=(64, 64)) / 8, rng.normal(size=(16, 64))
WHOLE = functools.partial(Shard, reshard_after_forward=False)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Auto}


def compiled(kind, recipe, shard, arguments, of_x):
    def layer(w, x, state):
        shards = {"x_shard": shard} if of_x else {"w_shard": shard}
        return jnp.tanh(fp8.dot(x, w, recipe=recipe, state=state, **shards))

    def loss(params, state):
        y = jax.checkpoint(layer, policy=fp8.save_fp8_residuals())(*params, state)
        return jnp.sum(y**2)

    gradients = fp8.value_and_grad(loss)
    if kind != "manual":
        return jax.jit(gradients).lower(*arguments).compile()

    def summed(params, state):
        value, grads, state = gradients(params, state)
        return jax.lax.psum(value, "fsdp"), grads, state

    specs = jax.tree.map(lambda each: each.sharding.spec, arguments)
    mapped = jax.shard_map(summed, in_specs=specs, out_specs=(P(), *specs))
    return jax.jit(mapped).lower(*arguments).compile()


CASES = [("delayed", kind, operand) for kind in KINDS for operand in "wx"]
CASES += [("rowwise", "auto", "w")]  # fprop and dgrad read two copies, so both are gathered


@pytest.mark.parametrize(("recipe", "kind", "operand"), CASES)
def test_a_checkpoint_gathers_once_if_both_matmuls_read_one_copy(recipe, kind, operand):
    shared, of_x = recipe == "delayed", operand == "x"
    recipe = getattr(fp8.recipes, recipe)()
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(KINDS[kind],))
    with jax.set_mesh(mesh):
        # Tokens are split beside w; x alone is split by its tokens, which wgrad sums over.
        specs = (P(None if of_x else "fsdp"), P("fsdp")), P()
        params = W.astype(np.float32), X.astype(np.float32)
        place = lambda spec, each: jax.tree.map(
            lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), each
        )
        arguments = (
            tuple(map(place, specs[0], params)),
            place(specs[1], fp8.init_state(recipe)),
        )
        shard, whole = (
            compiled(kind, recipe, made(0, "fsdp"), arguments, of_x) for made in (Shard, WHOLE)
        )
    first, second = (program.as_text().count(" all-gather(") for program in (shard, whole))
    if kind != "manual":  # there XLA merges equal gathers
        assert (first, second) == ((3, 2) if shared else (6, 6))  # of scales, too
    for mine, theirs in zip(
        *(jax.tree.leaves(each(*arguments)) for each in (shard, whole)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
