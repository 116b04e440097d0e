"""Labels of outputs, for each kind of equation that has sub-programs."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfp8.jaxprs._data_flow import labels_of

A, B, C = 0b001, 0b010, 0b100


@jax.custom_jvp
def custom_jvp(x, y):
    return x, y


custom_jvp.defjvp(lambda primals, tangents: (primals, tangents))


@jax.custom_vjp
def custom_vjp(x, y):
    return x, y


custom_vjp.defvjp(lambda x, y: ((x, y), None), lambda _, both: both)


@jax.custom_batching.custom_vmap
def custom_vmap(x, y):
    return x, y


custom_vmap.def_vmap(lambda size, mapped, x, y: ((x, y), tuple(mapped)))


def _on_a_mesh(x, y):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return jax.shard_map(lambda x, y: (x, y), mesh=mesh, in_specs=P(), out_specs=P())(x, y)


def _written(x, y):
    ref = jax.new_ref(x)
    ref[...] = y
    return ref[...], x


def _hands_on(x, y, z):
    """The third number of the carry reads the first one two iterations later."""
    return lax.fori_loop(0, 9, lambda _, c: (c[0], c[0], c[1]), (x, y, z))


def _scanned(x, y, z):
    """y is closed over, and z is split."""
    zs = jnp.stack([z, z])
    return lax.scan(lambda c, z: (c + y, (z, 2 * c)), x, zs)


def _counted(x, y, z):
    """z ends the loop."""
    return lax.while_loop(lambda c: c[0] < z, lambda c: (c[0] + 1, 2 * c[1]), (x, y))


def _hands_on_while(x, y, z):
    return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[2], z, c[3]), (0, x, y, y))[1:]


def _chosen(x, y, z):
    return lax.cond(x < 1, lambda y, z: (y, z, 1.0), lambda y, z: (z, -z, 2.0), y, z)


CASES = {
    "identity": (lambda x, y: (x, y), (A, B)),
    "literals and constants": (lambda x, y: (1.0, jnp.arange(3.0), x + np.ones(3)), (0, 0, A)),
    "an unknown equation": (lambda x, y: lax.sort((x[None], y[None])), (A | B, A | B)),
    "selected": (lambda x, y: (jnp.where(x < 1, y, y), jnp.where(x < 1, 0, 1)), (A | B, A)),
    "finite": (lambda x, y: (jnp.isfinite(x), jnp.where(jnp.isfinite(x), y, 0)), (0, B)),
    "nan": (lambda x, y: jnp.where(jnp.isnan(x), y, 0), (A | B,)),
    "jit": (jax.jit(lambda x, y: (y, x)), (B, A)),
    "checkpoint": (jax.checkpoint(lambda x, y: (y, x)), (B, A)),
    "custom_jvp": (custom_jvp, (A, B)),
    "custom_vjp": (custom_vjp, (A, B)),
    "custom_vmap": (custom_vmap, (A, B)),
    "shard_map": (_on_a_mesh, (A, B)),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), (A, B)),
    "device_put": (lambda x, y: jax.device_put((x, y), jax.devices()[0]), (A, B)),
    "a reference": (_written, (A | B, A | B)),
    "a loop that hands on": (_hands_on, (A, A | B, A | B | C)),
    "a scan": (_scanned, (A | B, C, A | B)),
    "a loop that counts": (_counted, (A | C, A | B | C)),
    "a while loop that hands on": (_hands_on_while, (A | B | C, B | C, B)),
    "cond": (_chosen, (A | B | C, A | C, A)),
}


@pytest.mark.parametrize("name", CASES)
def test_labels(name):
    function, expected = CASES[name]
    inputs = len(inspect.signature(function).parameters)
    program = jax.make_jaxpr(function)(*[jnp.float32(1.0)] * inputs)
    assert tuple(labels_of(program, [A, B, C][:inputs])) == expected


def test_a_scan_of_no_iterations_has_its_first_carry():
    program = jax.make_jaxpr(lambda x, y: lax.scan(lambda c, _: (y, c), x, length=0))(1.0, 2.0)
    assert labels_of(program, [A, B]) == [A | B, A | B]
