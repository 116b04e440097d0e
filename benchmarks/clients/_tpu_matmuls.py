"""Counts the matmuls of a train step for TPUs that read FP8, and what its all-gathers send.

    python benchmarks/clients/_tpu_matmuls.py FOLDER

FOLDER is that of XLA's flag `--xla_dump_to`. The optimized program is read. A matmul is a
`convolution` there, and reads FP8 if both of its operands are FP8 arrays. Loop bodies count once.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jaxfp8.programs._hlo import Program, read_program, tensors_of

FP8 = ("float8_e4m3fn", "float8_e5m2")


def counts(program: Program) -> dict[str, Any]:
    matmuls = fp8 = 0
    gathers: Counter[str] = Counter()
    for computation in program.computations.values():
        for instruction in computation.values():
            read = [
                tensor.dtype
                for operand in instruction.operands
                if operand in computation
                for tensor in tensors_of(computation[operand].type)
            ]
            if instruction.opcode == "convolution":
                matmuls += 1
                fp8 += all(dtype in FP8 for dtype in read)
            elif re.fullmatch("all-gather(-start)?", instruction.opcode):
                gathers.update(read)
    return {"matmuls": matmuls, "fp8": fp8, "all_gathers": dict(sorted(gathers.items()))}


def main(folder: Path) -> None:
    found = [
        counts(read_program(file.read_text())) for file in folder.glob("*.after_optimizations.txt")
    ]
    if not found:
        sys.exit(f"{folder} has no *.after_optimizations.txt. Set XLA's flags for dumps.")
    print(json.dumps(max(found, key=lambda of: of["matmuls"])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
