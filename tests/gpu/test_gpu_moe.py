"""A layer of experts on the chip, sent over a mesh of one GPU: the results of a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

T, K, F, E, CHOICES = 512, 256, 128, 8, 2
# Payloads of x are equal. Sums in another order move some values of h by a step of E4M3, 2^-4.
CLOSE = 2e-2
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
}


def arrays():
    """x, gates, the gradient of y, w_in, w_out, and choices. Expert 5 gets nothing."""
    random = np.random.default_rng(0)
    shapes = (T, K), (T, CHOICES), (T, K), (E, K, 2 * F), (E, F, K)
    x, gates, g, w_in, w_out = (random.standard_normal(shape) for shape in shapes)
    wide = x, 1e-3 * g, w_in / 16, w_out / 11
    x, g, w_in, w_out = (each.astype(jnp.bfloat16) for each in wide)
    chosen = np.argsort(random.random((T, E)) + 9 * (np.arange(E) == 5), axis=1)[:, :CHOICES]
    return x, np.abs(gates).astype(np.float32), g, w_in, w_out, chosen.astype(np.int32)


def step_on(device, recipe, kernels=None):
    """Results, gradients and states of a train step on a mesh of one device."""
    parallel = fp8.moe.ExpertParallel(axis="expert", gradient_sent_in_fp8=True)

    def step(x, gates, g, w_in, w_out, chosen, states):
        def loss(params, states):
            x, gates, w_in, w_out = params
            y = fp8.moe.swiglu_experts(
                x, gates, chosen, w_in, w_out, recipe=recipe, states=states, parallel=parallel,
                kernels=kernels,
            ).y  # fmt: skip
            return jnp.sum((y * g).astype(jnp.float32)), y

        run = fp8.value_and_grad(loss, has_aux=True)
        (_, y), gradients, states = run((x, gates, w_in, w_out), states)
        return (y, *gradients), states

    mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,), devices=[device])
    one = fp8.init_state(recipe) if recipe.rows else ()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * E), one)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    options = None if kernels is None else kernels.compiler_options(recipe)
    run = jax.jit(mapped, compiler_options=options)
    results, states = run(*arrays(), (stacked, stacked))
    return jax.tree.map(np.asarray, (results, states))


@pytest.mark.parametrize("by", ["chosen", "XLA"])
@pytest.mark.parametrize("name", RECIPES)
def test_results_are_those_of_a_cpu(name, by, gpu, cpu, chip):
    named = {} if by == "chosen" else {"casts": "xla", "matmuls": "xla"}
    recipe = RECIPES[name]
    results, states = step_on(gpu, recipe, fp8.Kernels(chip, **named))
    want, want_states = step_on(cpu, recipe)
    for mine, other in zip(results, want, strict=True):
        mine, other = mine.astype(np.float64), other.astype(np.float64)
        assert np.isfinite(mine).all()
        assert np.linalg.norm(mine - other) <= CLOSE * np.linalg.norm(other)
    assert not results[3][5].any()
    # Amaxes of x are those of the same numbers. Those of h and of gradients are close.
    for mine, other in zip(jax.tree.leaves(states), jax.tree.leaves(want_states), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-2)
