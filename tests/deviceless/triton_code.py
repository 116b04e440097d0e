"""The machine code of a Triton kernel, for a GPU that is not there."""

import importlib
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp


def call_of(monkeypatch, module, function, *arguments):
    """What the library gives to `triton_call` in a module, in the trace of a function."""
    calls = []

    def record(*arrays, **call):
        calls.append(call | {"arrays": arrays})
        return [jnp.zeros(result.shape, result.dtype) for result in call["results"]]

    jax.clear_caches()  # or it would not be traced again, and afterwards not with the kernel
    with monkeypatch.context() as patched:
        from jaxfp8.kernels import _dispatch

        patched.setattr(importlib.import_module(module), "triton_call", record)
        patched.setattr(
            _dispatch, "platform_dependent", lambda *arrays, cuda, default: cuda(*arrays)
        )
        jax.eval_shape(function, *arguments)
    jax.clear_caches()
    (call,) = calls
    return call


def compiled(call, arch, folder, monkeypatch):
    """PTX, opcodes of the SASS, and what a thread uses."""
    import triton
    from jax_triton.triton_lib import _JAX_TO_TRITON_TYPE_MAP as names
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    parameters = call.pop("kernel")
    constants = {name: value for name, value in call.items() if name in parameters.arg_names}
    arrays = [*call["arrays"]]
    if call.get("overwrites"):
        constants |= {name: None for name in parameters.arg_names if name.startswith("same_")}
    else:
        arrays += call["results"]
    pointers = [name for name in parameters.arg_names if name not in constants]
    types = ["*" + names[jnp.dtype(of.dtype)] for of in arrays]
    source = triton.compiler.ASTSource(
        parameters,
        signature=dict.fromkeys(constants, "constexpr") | dict(zip(pointers, types, strict=True)),
        constexprs=constants,
        attrs={(parameters.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    options = {"num_warps": call["warps"], "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm
    (binary := folder / "kernel.cubin").write_bytes(code["cubin"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    used, listing = (
        subprocess.run(
            [tools / tool, option, binary], capture_output=True, text=True, check=True
        ).stdout
        for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
    )
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ +)?([A-Z][A-Z0-9_.]+)", listing)
    return code["ptx"], opcodes, used


def moved(opcodes, kind, threads):
    """Bytes that a block of threads moves by opcodes of a kind, by how many bytes each of them
    moves.
    """
    widths = {"128": 16, "64": 8, "U16": 2, "U8": 1}
    moved = {}
    for opcode in opcodes:
        if opcode.startswith(kind):
            width = next((width for name, width in widths.items() if name in opcode.split(".")), 4)
            moved[width] = moved.get(width, 0) + width * threads
    return moved
