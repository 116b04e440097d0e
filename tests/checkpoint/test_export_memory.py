"""An export holds a piece of the model a second time, and no more."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MB = 10**6

# Prints the peak of the process's memory during an export, above what it held before.
CODE = """
    import sys
    import jax, jax.numpy as jnp
    import jaxfp8 as fp8

    count, side, kind, format, folder = sys.argv[1:]
    shape = int(side), int(side)
    params = {f"l{i}": {"kernel": jnp.full(shape, i, jnp.bfloat16)} for i in range(int(count))}
    if kind == "fp8":
        cast = jax.jit(lambda p: fp8.quantize_params(p, fp8.recipes.blockwise(), primary=True))
        params = {name: cast(each) for name, each in params.items()}
    if kind == "sharded":
        mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        params = jax.device_put(params, jax.NamedSharding(mesh, jax.P("d", None)))
    jax.block_until_ready(params)
    format = None if format == "None" else format
    small = {"l": {"kernel": jnp.ones((256, 128), jnp.bfloat16)}}
    fp8.checkpoint.export(small, folder, format=format)  # imports, and threads of XLA

    def status(field):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as peaks:
        peaks.write("5")
    fp8.checkpoint.export(params, folder, format=format)
    print(status("VmHWM") - before)
"""

CASES = [(5, 6144, "dense", "hf-fp8")]  # 0.38 GB, the largest tensor has 75 MB
LARGE = [  # 2.1 GB
    (16, 8192, "dense", "hf-fp8"),
    (4, 16384, "dense", "compressed-mxfp8"),
    (16, 8192, "sharded", "compressed-tensor"),
    (16, 8192, "fp8", "hf-fp8"),
    (16, 8192, "fp8", None),
]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize(
    ("count", "side", "kind", "fmt"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)],
)
def test_memory_of_an_export(count, side, kind, fmt, tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    given = [str(each) for each in (count, side, kind, fmt, tmp_path)]
    command = [sys.executable, "-c", textwrap.dedent(CODE), *given]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    largest = side * side * (1 if kind == "fp8" else 2)
    assert int(run.stdout) < 1.2 * largest + 200 * MB, run.stdout
