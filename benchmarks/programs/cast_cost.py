"""What a cast to FP8 costs in a program that XLA compiles: bytes of memory and instructions.

The programs are compiled, not run.

    python benchmarks/programs/cast_cost.py

The script compares two casts of `jaxfp8/numerics/_rounding.py`. One builds its payload as a byte.
The other ends in a conversion, which XLA removes if the payload is converted back. Instructions are
those of one thread's machine code, divided by the number of values that the thread casts. "and
back" is the cast and its dequantization to bfloat16 in one kernel.

The disassembler is that of triton.

Needs: the wheels of jax[cuda13] and triton, no GPU.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["XLA_FLAGS"] = f"--xla_dump_emitter_re=ptx --xla_dump_to={tempfile.mkdtemp()}"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "deviceless"))

import jax
import jax.numpy as jnp
import triton
from program import Program
from targets import array, compile_for

import jaxfp8 as fp8
from jaxfp8.numerics._rounding import kernel_cast, saturating_cast

DUMP = Path(os.environ["XLA_FLAGS"].rpartition("=")[2])
ARCHITECTURES = {"h200": "sm_90a", "b200": "sm_100a", "a100": "sm_80"}
CASTS = {"conversion": kernel_cast, "byte": saturating_cast}
SIDE = 4096
PTXAS = (
    Path(next(iter(importlib.util.find_spec("nvidia").submodule_search_locations)))
    / "cu13/bin/ptxas"
)
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
LAUNCH = re.compile(r"(\w+) grid: \[(\d+), 1, 1\] threads: \[(\d+), 1, 1\]")
OPCODE = re.compile(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)")


def cost(chip: str, cast: Callable[..., Any], *, back: bool) -> tuple[float, float]:
    """Instructions and bytes of memory for each value of a cast.

    `back` adds the dequantization.
    """

    def function(x, m):
        values = cast(x, m, fp8.E4M3)
        return (values.astype(jnp.float32) * m).astype(jnp.bfloat16) if back else values

    for old in DUMP.iterdir():
        old.unlink()
    compiled = compile_for(chip, function, array(SIDE, SIDE), array(dtype=jnp.float32))
    program = Program(compiled.as_text())
    launches = [
        found
        for file in DUMP.glob("*thunk_sequence.txt")
        for found in LAUNCH.findall(file.read_text())
    ]
    # The largest launch is the cast. A smaller one may read the multiplier only.
    name, blocks, threads = max(launches, key=lambda launch: int(launch[1]))
    (kernel,) = (file for file in DUMP.glob("*.ptx") if f".entry {name}(" in file.read_text())
    cubin = DUMP / "kernel.cubin"
    subprocess.run([PTXAS, f"-arch={ARCHITECTURES[chip]}", kernel, "-o", cubin], check=True)
    listing = subprocess.run(
        [DISASSEMBLER, "-c", cubin], check=True, capture_output=True, text=True
    ).stdout
    body = listing.split(f".text.{name}:")[1].split(".text.")[0]
    instructions = sum(opcode != "NOP" for opcode in OPCODE.findall(body))
    values = SIDE**2 / (int(blocks) * int(threads))  # of one thread
    return instructions / values, program.traffic(program.entry) / SIDE**2


def main() -> None:
    print(
        f"Of each value, bfloat16 [{SIDE}, {SIDE}] to E4M3, jax {jax.__version__}: instructions, "
        "bytes"
    )
    print("| | " + " | ".join(f"{cast}{end}" for end in ("", " and back") for cast in CASTS) + " |")
    print("|---" * (1 + 2 * len(CASTS)) + "|")
    for chip in ARCHITECTURES:
        cells = [cost(chip, cast, back=back) for back in (False, True) for cast in CASTS.values()]
        print(
            f"| {chip} | " + " | ".join(f"{count:.1f}, {size:.1f}" for count, size in cells) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
