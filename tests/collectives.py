"""Collectives inside of a `shard_map`, and what a `WireReport` counts of them."""

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding


def compile_on(mesh: Mesh, f, *arguments, into, out):
    """`f`, compiled inside a shard_map over a mesh; arguments are (shape, dtype)."""
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(arguments, into, strict=True)
    ]
    mapped = jax.shard_map(f, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)
    return jax.jit(mapped).lower(*arrays).compile()


def counts(report):
    """(times, bytes of operands, bytes sent) of each kind, dtype and size of a group."""
    return {
        (t.kind, t.dtype, t.group_size): (t.times, t.operand_bytes, t.wire_bytes)
        for t in report.transfers
    }


def gather(x):
    return lax.all_gather(x, "fsdp", tiled=True)


def scan(f, length):
    return lambda x: lax.scan(lambda carry, _: (f(carry), None), x, None, length=length)[0]
