"""Train steps and forward passes go through files to another process, and give the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contracts import exported

import jaxfp8 as fp8

# optax.adam raises a float to its int32 step count
pytestmark = pytest.mark.usefixtures("standard_promotion")

# Layout hints have no meaning of their own, so XLA reads those of any version.
HINTS = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
PLATFORMS = ("cpu", "cuda", "tpu")
SHAPE = (32, 256)


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    w1, w2 = (jax.random.normal(key, (256, 256)) / 16 for key in keys[:2])
    return {"w1": w1, "w2": w2}, jax.random.normal(keys[2], SHAPE)


def step_of(recipe, tx, dtype):
    """A train step, and its arguments: a tree of parameters and of all states, and x."""

    def loss(params, state, x):
        for name, w in params.items():
            x = fp8.dot(x, w.astype(x.dtype), recipe=recipe, state=state[name])
        return jnp.mean(jnp.square(x - 1))

    def step(train, x):
        value, grads, state = fp8.value_and_grad(loss)(train["params"], train["state"], x)
        updates, opt_state = tx.update(grads, train["opt_state"], train["params"])
        params = optax.apply_updates(train["params"], updates)
        return {"params": params, "opt_state": opt_state, "state": state}, value

    params, x = arrays()
    params = {name: w.astype(dtype) for name, w in params.items()}
    state = {name: fp8.init_state(recipe) for name in params}
    return step, ({"params": params, "opt_state": tx.init(params), "state": state}, x)


def forward_of(recipe):
    """A forward pass whose weights are in FP8, and its arguments."""
    params, x = arrays()

    def forward(weights, x):
        for layer in weights.values():
            x = fp8.dot(x, layer["kernel"], recipe=recipe)
        return x

    weights = fp8.quantize_params(
        {name: {"kernel": w} for name, w in params.items()}, recipe, primary=True
    )
    return forward, (weights, x)


def programs():
    int8 = fp8.optim.with_master_weights(fp8.optim.adamw(1e-3), master=fp8.optim.BFloat16Plus())
    return {
        "delayed, adam": step_of(fp8.recipes.delayed(), optax.adam(1e-3), jnp.float32),
        "blockwise, int8": step_of(fp8.recipes.blockwise(), int8, jnp.bfloat16),
        "weights in FP8": forward_of(fp8.recipes.mxfp8()),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the programs, and their results in this process and in another one."""
    folder = tmp_path_factory.mktemp("programs")
    exported.name_optax_states()
    results = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for name, (function, args) in programs().items():
            program = jax.jit(function)
            exported.write(folder, name, program, *args)
            results[name] = program(*args)
    run = subprocess.run(
        [sys.executable, exported.__file__, str(folder), *results],
        env={**os.environ, "PYTHONPATH": str(Path(fp8.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return folder, results


@pytest.mark.parametrize("name", ["delayed, adam", "blockwise, int8", "weights in FP8"])
def test_a_program_from_a_file_gives_the_same_bits(written, name):
    folder, results = written
    found, wanted = np.load(folder / f"{name}_result.npz"), exported.as_bytes(results[name])
    assert {*found} == {*wanted}
    for leaf, expected in wanted.items():
        np.testing.assert_array_equal(found[leaf], expected)


@pytest.mark.parametrize("name", ["delayed, adam", "blockwise, int8", "weights in FP8"])
def test_one_file_serves_several_platforms(written, name):
    """XLA fuses the update of weights otherwise then, so that their last bits may differ."""
    _, results = written
    function, args = programs()[name]
    export = jax.export.export(jax.jit(function), platforms=PLATFORMS, disabled_checks=HINTS)
    found = jax.export.deserialize(bytearray(export(*args).serialize())).call(*args)
    wanted = results[name]
    if isinstance(found, tuple):
        for mine, its in zip(
            *(jax.tree.leaves(each[0]["params"]) for each in (found, wanted)), strict=True
        ):
            np.testing.assert_allclose(*(np.float32(each) for each in (mine, its)), rtol=2.0**-8)
        found, wanted = ((value, train["state"]) for train, value in (found, wanted))
    for mine, its in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_hints_have_no_guarantee():
    """JAX refuses a hint to the compiler, unless the user says that it may be in a file."""
    dot = jax.jit(lambda x, w: fp8.dot(x, w, recipe=fp8.recipes.rowwise()))
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    for checks in ([], HINTS):
        export = jax.export.export(dot, platforms=["cuda"], disabled_checks=checks)
        if checks:
            assert export(x, w).serialize()
            continue
        with pytest.raises(ValueError, match="LayoutConstraint"):
            export(x, w)
