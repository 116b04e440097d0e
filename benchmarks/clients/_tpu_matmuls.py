"""Counts the matmuls of a train step for TPUs that read FP8, and what its all-gathers send.

    python benchmarks/clients/_tpu_matmuls.py FOLDER

FOLDER is that of XLA's flag `--xla_dump_to`. The optimized program is read. A matmul is a
`convolution` there, and reads FP8 if both of its operands are FP8 arrays. Loop bodies count once.
"""

import json
import sys
from pathlib import Path
from typing import Any

from _matmuls import all_gathers

from jaxfp8.programs._hlo import Program, read_program, tensors_of

FP8 = ("float8_e4m3fn", "float8_e5m2")


def counts(program: Program) -> dict[str, Any]:
    matmuls = fp8 = 0
    for computation in program.computations.values():
        for instruction in computation.values():
            if instruction.opcode == "convolution":
                operands = [computation[name].type for name in instruction.operands]
                matmuls += 1
                fp8 += all(tensor.dtype in FP8 for each in operands for tensor in tensors_of(each))
    return {"matmuls": matmuls, "fp8": fp8, "all_gathers": all_gathers([program])}


def main(folder: Path) -> None:
    found = [
        counts(read_program(file.read_text())) for file in folder.glob("*.after_optimizations.txt")
    ]
    if not found:
        sys.exit(f"{folder} has no *.after_optimizations.txt. Set XLA's flags for dumps.")
    print(json.dumps(max(found, key=lambda of: of["matmuls"])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
