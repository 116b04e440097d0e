"""All features by name. Compiles one for a TPU that is not there, and reads the program."""

import contextlib
import math
import re
import time
from collections import Counter
from typing import Any, NamedTuple

import jax
import tpu_matmuls as matmuls
import tpu_meshes as meshes
import tpu_models as models
import tpu_training as training
from tpu_matmuls import Feature

from jaxfp8.programs._hlo import Instruction, read_program, tensors_of

SECTIONS = (
    matmuls.recipes, matmuls.operations, matmuls.casts, matmuls.transformations,
    models.linen_rows, models.nnx_rows, models.seen_rows, training.optimizers, meshes.meshes,
)  # fmt: skip

# XLA multiplies tiles in bfloat16, because a matrix unit has no scales. A tile along a contracted
# axis with a float32 scale is multiplied alone, and read in FP8.
TILES = re.compile("blockwise|mxfp8|of tiles")


def features() -> matmuls.Rows:
    """All rows. No name is there twice."""
    rows: matmuls.Rows = {}
    for section in SECTIONS:
        made = section()
        if twice := rows.keys() & made.keys():
            raise ValueError(f"two features are called {sorted(twice)}")
        rows |= made
    return rows


# The scopes around the matmuls of quantized layers.
QUANTIZED = re.compile(r"jaxfp8\.(fprop|dgrad|wgrad)(?!\.high_precision)")
PALLAS = "tpu_custom_call"


class Cast(NamedTuple):
    """A conversion to FP8. Layouts and shapes change, the number of elements does not.

    Tensors of other sizes tell those of one label apart.
    """

    label: str
    dtype: str
    elements: int

    def __str__(self) -> str:
        return f"{self.dtype}[{self.elements}] of {self.label}"


class Reading(NamedTuple):
    """What a program has.

    Attributes:
      fp8: matmuls of quantized layers whose two operands are FP8.
      matmuls: all matmuls of quantized layers. A loop body counts once.
      float64: instructions with a float64.
      casts: conversions to FP8.
    """

    fp8: int
    matmuls: int
    float64: int
    casts: Counter[Cast]


def read(text: str) -> Reading:
    """Reads an optimized program.

    XLA writes a matmul of a TPU as a convolution, in a fusion or alone. The types of its operands
    are those that the matrix unit is given.
    """
    fp8 = matmuls = float64 = 0
    casts: Counter[Cast] = Counter()
    for computation in read_program(text).computations.values():
        for each in computation.values():
            float64 += bool(re.search(r"\bf64\[", each.type))
            if _multiplies(each) and QUANTIZED.search(each.label):
                matmuls += 1
                fp8 += len(_fp8_operands(each, computation)) >= 2
            if each.opcode == "convert" and _is_fp8(each.type):
                (operand,) = each.operands
                if not _is_fp8(computation[operand].type):
                    (made,) = tensors_of(each.type)
                    casts[Cast(each.label, made.dtype, math.prod(made.shape))] += 1
    return Reading(fp8, matmuls, float64, casts)


def _multiplies(instruction: Instruction) -> bool:
    return instruction.opcode in ("convolution", "dot") or (
        instruction.opcode == "custom-call" and instruction.call_target == PALLAS
    )


def _fp8_operands(instruction: Instruction, computation: dict[str, Instruction]) -> list[str]:
    return [name for name in instruction.operands if _is_fp8(computation[name].type)]


def _is_fp8(type: str) -> bool:
    """Whether it is an array of FP8 values. E8M0 is the format of scales."""
    return type.startswith(("f8e4m3", "f8e5m2"))


def lower(feature: Feature, devices: list[Any]) -> jax.stages.Lowered:
    """The feature, lowered for these devices, or for the first one if it has no mesh."""
    here = jax.sharding.SingleDeviceSharding(devices[0])

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or here
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    mesh = contextlib.nullcontext() if feature.mesh is None else jax.set_mesh(feature.mesh)
    with mesh:
        jitted = jax.jit(feature.function, donate_argnums=feature.donate)
        return jitted.lower(*jax.tree.map(placed, feature.arguments))


def folded(feature: Feature, devices: list[Any], casts: Counter[Cast]) -> list[str]:
    """Conversions to FP8 that the optimized program lacks, in words.

    A compiler may fold float32 -> FP8 -> float32 into nothing. It may also merge equal conversions,
    and drop unused ones. So the number of conversions in the source does not tell. A second program
    is compiled, in which a barrier follows each conversion to FP8. Nothing is folded there, and no
    fusion repeats a conversion. So the first program must have each of its conversions, as often
    or more often.
    """
    lowered = lower(feature, devices)
    add_barriers(lowered)
    asked = read(lowered.compile().as_text()).casts
    return sorted(map(str, (asked - casts).elements()))


def add_barriers(lowered: jax.stages.Lowered) -> int:
    """Puts an `optimization_barrier` behind each conversion to FP8, and returns their number."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    module, found = lowered.compiler_ir("stablehlo"), []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.convert":
            given, made = operation.operands[0].type, operation.results[0].type
            if "f8E" in str(made) and "f8E" not in str(given):
                found.append(operation)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
        for operation in found:
            result = operation.results[0]
            with ir.InsertionPoint.after(operation), operation.location:
                barrier = stablehlo.OptimizationBarrierOp([result])
            result.replace_all_uses_except(barrier.results[0], barrier.operation)
    return len(found)


def measure(feature: Feature, devices: list[Any], *, control: bool) -> dict[str, Any]:
    """A row of the table."""
    start = time.process_time()
    compiled = lower(feature, devices).compile()
    seconds = time.process_time() - start
    found = read(compiled.as_text())
    row = {
        "fp8": found.fp8,
        "matmuls": found.matmuls,
        "float64": found.float64,
        "casts": found.casts.total(),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": round(seconds, 2),
    }
    return row | ({"folded": folded(feature, devices, found.casts)} if control else {})
