"""Tables of docs/tpu.md have the figures of their results; test_tpu_estimates.py has others."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tpu.md").read_text()
OF_BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()
CHIPS = ("tpu7x", "v6e", "v5p", "v5e")


def rows_of(name):
    return json.loads((ROOT / "benchmarks" / name).read_text())["rows"]


def test_memory():
    totals = {
        (row["recipe"], row["loop"], row["kept"], row["chip"]): row["total"]
        for row in rows_of("programs/results/tpu_memory.json")
    }
    found = re.findall(
        r"^\| `?(\w+)(?:\(\)`)? \| (scan|unrolled) \| (by jax|inputs) \| (.*) \|$", PAGE, re.M
    )
    assert {(*key, chip) for *key, _ in found for chip in CHIPS} == totals.keys()
    for name, *way, cells in found:
        own, bf16 = ([totals[each, *way, chip] for chip in CHIPS] for each in (name, "bfloat16"))
        if name == "bfloat16":
            figures = [f"{total / 2**30:.2f} GiB" for total in own]
        else:
            figures = [f"{a / b:.2f}" for a, b in zip(own, bf16, strict=True)]
        assert cells.split(" | ") == figures, (name, way)


TILES = re.compile("blockwise|mxfp8|of tiles")
# The first word of the names of features, and the words of the page.
KINDS = {
    "recipe": "recipes and their options", "op": "ops", "cast": "casts", "jax": "scan, checkpoint",
    "convert": "`fp8.convert`", "linen": "linen layers", "nnx": "nnx layers", "mesh": "FSDP",
    "optim": "moments", "comms": "collectives", "diagnostics": "`collect`",
}  # fmt: skip


def cells_of(rows):
    """Features that compile, and matmuls of FP8 operands: without tiles, and with them."""
    good = [row for row in rows if "error" not in row]
    cells = [f"{len(good)} of {len(rows)}"]
    for tiled in (False, True):
        own = [row for row in good if bool(TILES.search(row["feature"])) == tiled]
        fp8, matmuls = (sum(row[key] for row in own) for key in ("fp8", "matmuls"))
        cells.append(f"{fp8} of {matmuls}" if matmuls else "–")
    return cells


def test_features():
    rows = rows_of("programs/results/tpu_features.json")
    for chip in CHIPS:
        (line,) = re.findall(rf"^\| {chip} \| (\d+ of .*) \|$", PAGE, re.M)
        own = [row for row in rows if row["chip"] == chip]
        others = [sum(row["float64"] for row in own), sum(len(row["folded"]) for row in own)]
        assert line.split(" | ") == [*cells_of(own), *map(str, others)]
    rows = [row for row in rows if row["chip"] == "tpu7x"]
    assert {row["feature"].split(":")[0] for row in rows} == KINDS.keys()
    for kind, words in KINDS.items():
        (line,) = re.findall(rf"^\| {words}[^|]* \| (\d+ of .*) \|$", OF_BENCHMARKS, re.M)
        assert line.split(" | ") == cells_of(
            [r for r in rows if r["feature"].startswith(f"{kind}:")]
        )


def test_wire():
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")
    for row in rows_of("wire/results/tpu_fsdp.json"):
        if row["recipe"] == "bfloat16":
            of_bf16 = sum(row["sent"].values())
        total = sum(row["sent"].values())
        sent = [sum(n for key, n in row["sent"].items() if key.startswith(f"{k} ")) for k in kinds]
        figures = [f"{each / 2**20:.0f}" for each in (*sent, total)] + [f"{total / of_bf16:.2f}"]
        name = row["recipe"] if row["recipe"] == "bfloat16" else f"`{row['recipe']}()`"
        assert f"| {' | '.join([str(row['cores']), name, *figures])} |\n" in PAGE


def test_maxtext():
    names = {"bfloat16": "none (bfloat16)", "qwix": "`fp8_full` (qwix)"}
    for name, row in rows_of("clients/results/maxtext_tpu.json").items():
        recipe, sent = name.removeprefix("FSDP | "), row["all_gathers"]
        fp8 = sent.get("uint8", 0) + sent.get("float8_e4m3fn", 0)
        gathers = [fp8, sent.get("bfloat16", 0), sent.get("float32", 0)]
        figures = [
            f"{row['fp8']} of {row['matmuls']}",
            *gathers,
            round(row["temporary_bytes"][0] / 2**20),
        ]
        cells = [names.get(recipe, f"`jaxfp8_{recipe}`"), *map(str, figures)]
        assert f"| {' | '.join(cells)} |\n" in PAGE, cells


def test_cycles():
    rows = {
        (row["case"], row["vmem_kib"], row["contender"]): row
        for row in rows_of("results/tpu.json")
        if row["chip"] == "tpu7x"
    }
    names = {"flax": "flax `Fp8DirectDotGeneralOp`", "qwix": "qwix 0.1.8"}
    for contender in ("delayed", "current", "rowwise", "flax", "qwix"):
        ratios = [
            rows["layer", vmem, "bfloat16"][clock] / rows["layer", vmem, contender][clock]
            for vmem in ("default", "49152")
            for clock in ("cycles", "second")
        ]
        cells = [names.get(contender, f"`{contender}()`"), *(f"{each:.2f}" for each in ratios)]
        assert f"| {' | '.join(cells)} |\n" in PAGE
    for contender in ("delayed", "current", "rowwise", "flax", "qwix"):
        cells = [names.get(contender, f"`{contender}()`")]
        for case in ("block", "block-inputs"):
            if (case, "default", contender) not in rows:
                cells += ["–", "–"]
                continue
            bf16, own = (rows[case, "default", each] for each in ("bfloat16", contender))
            cycles = [each["cycles"] - each["kinds"]["attention"] for each in (bf16, own)]
            memory = own["temporary_bytes"] / bf16["temporary_bytes"]
            cells += [f"{cycles[0] / cycles[1]:.2f}", f"{memory:.2f}"]
        assert f"| {' | '.join(cells)} |\n" in PAGE
    gains = [
        rows["layer", "default", each]["cycles"] / rows["layer", "49152", each]["cycles"]
        for each in ("bfloat16", "delayed")
    ]
    words = " ".join(PAGE.split())
    assert "bfloat16 gains {:.2f} in this layer, and `delayed()` {:.2f}".format(*gains) in words
    for experts in ("experts-4096", "experts-512"):
        for name in ("delayed", "current", "rowwise"):
            bf16, own = (rows[experts, "default", each] for each in ("bfloat16", name))
            cells = [f"{bf16[clock] / own[clock]:.2f}" for clock in ("second", "both")]
            cells += [f"{own['temporary_bytes'] / bf16['temporary_bytes']:.1f}"]
            tokens = experts.removeprefix("experts-")
            assert f"| {tokens} | `{name}()` | {' | '.join(cells)} |\n" in PAGE
    mxfp8, blockwise = (
        rows["layer", "default", each]["temporary_bytes"] / 2**30 for each in ("mxfp8", "blockwise")
    )
    memory = f"`mxfp8()` needs {mxfp8:.1f} GiB of temporary memory."
    assert f"{memory} `blockwise()` needs {blockwise:.1f} GiB." in words


def test_steps():
    rows = {
        tuple(row[key] for key in ("model", "loop", "kept", "contender")): row
        for row in rows_of("programs/results/tpu_steps.json")
    }
    names = {"bfloat16": "bfloat16", "qwix": "qwix", "delayed": "`delayed()`"}
    gains = []
    for *way, contender in rows:
        bf16, own = (rows[*way, each] for each in ("bfloat16", contender))
        gain = f"{bf16['cycles'] / own['cycles']:.2f}"
        gains += [gain] if contender == "delayed" else []
        seconds = [sum(each["seconds"].values()) for each in (own, bf16)]
        cells = [
            f"`{way[0]}`", *way[1:], names[contender], f"{own['cycles'] / 1e6:.0f}", gain,
            f"{own['temporaries'] / 2**30:.1f}",
            f"{own['temporaries'] / bf16['temporaries']:.2f}",
            f"{seconds[0] / seconds[1]:.1f}",
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |\n" in PAGE
    words = " ".join(PAGE.split())
    assert f"are then estimated to be {min(gains)} to {max(gains)} times as fast" in words
    bf16, qwix, own = (rows["70B", "scan", "inputs", n] for n in names)
    sent = "{:.2f} of bfloat16's bytes with `delayed()`, and {:.2f} with qwix"
    assert sent.format(own["wire"] / bf16["wire"], qwix["wire"] / bf16["wire"]) in words
    unknown = [rows["8B", "scan", "inputs", n]["unknown"] for n in ("delayed", "bfloat16")]
    assert "{} to bfloat16's {} in the first rows".format(*unknown) in words
