"""A saved and restored run continues bit for bit."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optim_cases import KINDS, params32, train
from same_bits import assert_same_bits

from jaxfp8.optim import init_master_weights, master_weights, with_master_weights

pytestmark = pytest.mark.usefixtures("standard_promotion")


def flax_bytes(tree, folder):
    target = jax.tree.map(np.zeros_like, tree)
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(tree))


def orbax_standard(tree, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "run", jax.tree.map(jnp.zeros_like, tree))


@pytest.mark.parametrize(
    ("save", "kind"),
    [
        *(pytest.param(flax_bytes, kind, id=f"flax-{kind}") for kind in KINDS),
        *(
            pytest.param(
                orbax_standard,
                kind,
                id=f"orbax-{kind}",
                marks=() if kind == "bfloat16 + 8" else pytest.mark.slow,
            )
            for kind in KINDS
        ),
    ],
)
def test_a_restored_run_continues_bit_for_bit(kind, save, tmp_path):
    tx = with_master_weights(optax.adamw(3e-3), master=KINDS[kind])
    keep = lambda path, x: path == "scale"
    start = functools.partial(init_master_weights, tx, keep_float32=keep)
    run = train(tx, *jax.jit(start)(params32()), 5)
    restored = save(run, tmp_path)
    assert jax.tree.structure(restored) == jax.tree.structure(run)
    assert_same_bits(restored, run)
    masters = jax.jit(master_weights)
    assert_same_bits(masters(restored[1], restored[0]), masters(run[1], run[0]))
    restored = jax.tree.map(np.asarray, restored)  # before `run` is donated
    assert_same_bits(train(tx, *restored, 5, first=5), train(tx, *run, 5, first=5))


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_numpy_are_parameters_too(kind):
    tx = with_master_weights(optax.sgd(0.125), master=KINDS[kind])
    params, opt_state = init_master_weights(tx, jax.tree.map(np.asarray, params32()))
    expected, reference = init_master_weights(tx, params32())
    assert_same_bits((params, opt_state), (expected, reference))
