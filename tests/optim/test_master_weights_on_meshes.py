"""On every mesh the bits are those of one device. Master weights are split as their weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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


def train(tx, params, gradients):
    """Weights, optimizer state and master weights after a step with each of the gradients."""
    params, opt_state = init_master_weights(tx, params)
    for grads in gradients:
        params, opt_state = step(tx, grads, opt_state, params)
    return params, opt_state, master_weights(opt_state, params)


def run(kind, put=lambda tree: tree):
    tx = with_master_weights(SGD, master=KINDS[kind])
    gradients = [put(gradient(params32(), i)) for i in range(STEPS)]
    return jax.jit(functools.partial(train, tx))(put(params32()), gradients)


one_device = functools.cache(run)


def rows(*default):
    """All kinds of masters and all splits, of which the default suite has some pairs."""
    for kind in KINDS:
        for specs in SPECS:
            marks = () if (kind, specs) in default else pytest.mark.slow
            yield pytest.param(kind, specs, id=f"{specs}-{kind}", marks=marks)


def whole_arrays():
    """On an Explicit mesh all kinds of masters. On an Auto mesh one of arrays, one of a scale."""
    on_explicit = {
        ("float32", "split by rows"),
        ("bfloat16 + 16", "split by both"),
        ("bfloat16 + 8", "all on one axis"),
        ("float16", "split by both"),
    }
    on_auto = {("bfloat16 + 8", "all on one axis"), ("float16", "split by both")}
    for axis_type, default in ((AxisType.Auto, on_auto), (AxisType.Explicit, on_explicit)):
        for row in rows(*default):
            name = f"{axis_type.name.lower()}-{row.id}"
            yield pytest.param(*row.values, axis_type, id=name, marks=row.marks)


@pytest.mark.parametrize(("kind", "specs", "axis_type"), list(whole_arrays()))
def test_whole_arrays(kind, specs, axis_type):
    specs, mesh = SPECS[specs], mesh_of(axis_type)
    with jax.set_mesh(mesh):
        params, opt_state, masters = run(kind, lambda tree: put(tree, specs, mesh))
    assert_same_bits((params, opt_state, masters), one_device(kind))
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


@pytest.mark.parametrize(
    ("kind", "specs"),
    list(
        rows(
            ("float32", "split by rows"),
            ("bfloat16 + 8", "split by both"),
            ("float16", "all on one axis"),
        )
    ),
)
def test_inside_shard_map(kind, specs):
    tx, specs = with_master_weights(SGD, master=KINDS[kind]), SPECS[specs]
    mesh = mesh_of(AxisType.Auto)
    state_specs = spec_tree(tx, specs)

    mapped = jax.shard_map(
        functools.partial(train, tx),
        mesh=mesh,
        in_specs=(specs, [specs] * STEPS),
        out_specs=(specs, state_specs, specs),
    )
    found = jax.jit(mapped)(
        put(params32(), specs, mesh),
        [put(gradient(params32(), i), specs, mesh) for i in range(STEPS)],
    )
    assert_same_bits(found, one_device(kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float16"])
def test_without_types_nothing_is_shared(kind):
    mesh, tx = mesh_of(AxisType.Auto), with_master_weights(SGD, master=KINDS[kind])
    one = lambda p, g: step(tx, g, tx.init(p), p)[0]
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    weights, grads = np.ones((8, 4), jnp.bfloat16), np.ones((8, 4), np.float32)
    assert_same_bits(jax.jit(mapped)(weights, grads), jax.jit(one)(weights, grads))


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
    weights, opt_state = jax.jit(functools.partial(init_master_weights, tx))(params32())
    jitted = jax.jit(functools.partial(step, tx), donate_argnums=(1, 2))
    jitted(gradient(params32(), 0), opt_state, weights)  # a donation without use is a warning
    # The old scale of Float16 is a scalar.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(opt_state) if leaf.ndim)
