"""How many instructions XLA:CPU has for the cast of one copy of a tensor, for each recipe.

The program is the train step of `programs.py` for a CPU. A cast is a computation that converts to
FP8. What XLA fuses to it counts as well. Nothing runs.

    python benchmarks/programs/cast_instructions.py --json result.json
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import _steps as steps
from program import Instruction, Program
from programs import BASELINE, RECIPES, SIDE, about_this_machine

CASTING = [name for name in RECIPES if name != BASELINE]
BLOCKS = 2
LAYERS = 2 * BLOCKS


def converts(instruction: Instruction) -> bool:
    """Whether it converts to E4M3 or E5M2. E8M0 is the format of scales."""
    return instruction.op == "convert" and instruction.type.startswith(("f8e4m3", "f8e5m2"))


def row(name: str) -> dict[str, Any]:
    """The casts of a recipe. "delayed" has settled states, "unsettled" others."""
    settled = name != "unsettled"
    sizes = steps.Sizes(
        "mlp", "cpu", BLOCKS, False, SIDE["cpu"], SIDE["cpu"], keep="products", manual=False
    )
    recipe = steps.llama.RECIPES[name if settled else "delayed"]
    step = steps.mlp(recipe, sizes, settled)
    computations = Program(step().lower().compile().as_text()).computations.values()
    casts = [len(each) for each in computations if any(map(converts, each.values()))]
    figures = {"median": statistics.median(casts), "min": min(casts), "max": max(casts)}
    whole = sum(map(len, computations))
    return {
        "recipe": name,
        "casts_per_layer": len(casts) / LAYERS,
        "instructions_of_a_cast": figures,
        "share_of_the_program": round(sum(casts) / whole, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=CASTING, default=CASTING)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    given = parser.parse_args()
    rows = [row(name) for name in given.recipes]
    print("| recipe | casts of a layer | instructions of one | share of the program |")
    print("| --- | --- | --- | --- |")
    for each in rows:
        of_one = "{median:.0f} ({min} to {max})".format(**each["instructions_of_a_cast"])
        cells = [each["recipe"], f"{each['casts_per_layer']:.1f}", of_one]
        print(f"| {' | '.join(cells)} | {each['share_of_the_program']:.2f} |")
    if given.json:
        result = {
            "command": "python benchmarks/programs/cast_instructions.py",
            **about_this_machine(),
        }
        given.json.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
