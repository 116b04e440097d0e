"""On every mesh the bits are those of one device. Master weights are split as their weights."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optim_cases import KINDS, gradient, params32, step
from same_bits import assert_same_bits

from jaxfp8.optim import Float16, init_master_weights, master_weights, with_master_weights

pytestmark = pytest.mark.usefixtures("standard_promotion")
# Exact products: the same bits, whether or not XLA contracts them with a sum.
SGD = optax.sgd(2.0**-7, momentum=0.5)
SPECS = {
    "split by rows": {"dense": {"kernel": P("data"), "bias": P()}, "scale": P()},
    "split by both": {"dense": {"kernel": P("data", "model"), "bias": P("model")}, "scale": P()},
    "all on one axis": {
        "dense": {"kernel": P(("data", "model")), "bias": P(("data", "model"))},
        "scale": P("data"),
    },
}
STEPS = 3


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def put(tree, specs, mesh):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def run(tx, params, opt_state, gradients):
    jitted = jax.jit(functools.partial(step, tx), donate_argnums=(1, 2))
    for grads in gradients:
        params, opt_state = jitted(grads, opt_state, params)
    return params, opt_state


def one_device(tx):
    return run(
        tx, *init_master_weights(tx, params32()), [gradient(params32(), i) for i in range(STEPS)]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_whole_arrays(kind, specs, axis_type):
    tx, specs, mesh = with_master_weights(SGD, master=KINDS[kind]), SPECS[specs], mesh_of(axis_type)
    with jax.set_mesh(mesh):
        params, opt_state = init_master_weights(tx, put(params32(), specs, mesh))
        gradients = [put(gradient(params32(), i), specs, mesh) for i in range(STEPS)]
        params, opt_state = run(tx, params, opt_state, gradients)
        masters = master_weights(opt_state, params)
    expected, reference = one_device(tx)
    assert_same_bits((params, opt_state), (expected, reference))
    assert_same_bits(masters, master_weights(reference, expected))
    stored = [field for field in opt_state.masters if jax.tree.leaves(field)]
    for tree in (params, opt_state.inner[0].trace, stored[0]):
        jax.tree.map(lambda x, spec: check_split(x, spec, mesh), tree, specs)


def check_split(x, spec, mesh):
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (x.sharding, spec)


def spec_tree(tx, specs):
    """The specs of an optimizer state: those of the parameters, and P() for scalars."""
    _, opt_state = jax.eval_shape(lambda: init_master_weights(tx, params32()))
    return optax.tree.map_params(
        tx,
        lambda leaf, spec: None if leaf is None else spec if leaf.ndim else P(),
        opt_state,
        specs,
        transform_non_params=lambda leaf: P(),
        is_leaf=lambda x: x is None,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("specs", SPECS)
def test_inside_shard_map(kind, specs):
    tx, specs = with_master_weights(SGD, master=KINDS[kind]), SPECS[specs]
    mesh = mesh_of(AxisType.Auto)
    state_specs = spec_tree(tx, specs)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, [specs] * STEPS),
        out_specs=(specs, state_specs, specs),
    )
    def train(params, gradients):
        params, opt_state = init_master_weights(tx, params)
        for grads in gradients:
            params, opt_state = step(tx, grads, opt_state, params)
        return params, opt_state, master_weights(opt_state, params)

    params, opt_state, masters = train(
        put(params32(), specs, mesh),
        [put(gradient(params32(), i), specs, mesh) for i in range(STEPS)],
    )
    expected, reference = one_device(tx)
    assert_same_bits((params, opt_state), (expected, reference))
    assert_same_bits(masters, master_weights(reference, expected))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float16"])
def test_without_types_nothing_is_shared(kind):
    mesh, tx = mesh_of(AxisType.Auto), with_master_weights(SGD, master=KINDS[kind])
    train = jax.shard_map(
        lambda p, g: step(tx, g, tx.init(p), p)[0], mesh=mesh, in_specs=P("data"),
        out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    weights, grads = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((8, 4))
    assert_same_bits(jax.jit(train)(weights, grads), step(tx, grads, tx.init(weights), weights)[0])


def test_a_scale_without_types_is_an_error():
    mesh, tx = mesh_of(AxisType.Auto), with_master_weights(SGD, master=Float16())
    init = jax.shard_map(
        lambda p: tx.init(p).masters.values, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
        check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="check_vma=True"):
        init(jnp.ones((8, 4), jnp.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_can_be_donated(kind):
    tx = with_master_weights(SGD, master=KINDS[kind])
    weights, opt_state = init_master_weights(tx, params32())
    jitted = jax.jit(functools.partial(step, tx), donate_argnums=(1, 2))
    jitted(gradient(params32(), 0), opt_state, weights)  # a donation without use is a warning
    # The old scale of Float16 is a scalar.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(opt_state) if leaf.ndim)
