"""A dense layer on eight H200, data and tensor parallel.

FP8 matmuls, and amaxes that cross the mesh together.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from program import Program
from targets import dense_step, state_of, topology

import jaxfp8 as fp8

pytestmark = pytest.mark.deviceless

M, K, N = 1024, 512, 256


# Where x [M, K], w [K, N] and g [M, N] lie.
LAYOUTS = {
    "data": ((("data", "model"), None), (None, None), (("data", "model"), None)),
    "data and tensor": (("data", None), (None, "model"), ("data", "model")),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("delayed", "data"), ("delayed", "data and tensor"), ("current", "data and tensor")],
)
def test_parallel(name, layout, axis_type):
    recipe = fp8.recipes.get(name)
    devices = np.array(topology("h200", "1x1x8").devices).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)

    def array(shape, spec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    tensors = [
        array(shape, spec)
        for shape, spec in zip(((M, K), (K, N), (M, N)), LAYOUTS[layout], strict=True)
    ]
    state = jax.tree.map(lambda s: array(s.shape, (None,) * s.ndim, s.dtype), state_of(recipe))
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(dense_step(recipe))
            .lower(*tensors, state)
            .compile(fp8.Kernels("h200").compiler_options(recipe))
        )
    fp8.programs.assert_fp8_gemms(compiled, 3)
    program = Program(compiled.as_text())
    assert len(program.fp8_matmuls(program.entry)) == 3
    assert not program.other_matmuls(program.entry)
    if name == "delayed":
        # In the steady state no matmul waits for an amax, so that those of the same devices travel
        # together.
        found = [maximum.groups for maximum in program.maxima(program.entry)]
        assert len(found) == len(set(found)) == {"data": 1, "data and tensor": 3}[layout], found
