"""Reports of a run: the machine, one JSON file with the results, and tables in Markdown."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from target import Target

GIB = 2**30
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "triton",
    "jax-triton",
    "flax",
    "numpy",
)


def machine(target: Target, commit: str | None) -> dict[str, Any]:
    """The properties of the machine that the numbers depend on. None for unreadable ones."""
    device = target.device
    driver = Path("/proc/driver/nvidia/version")
    return {
        "chip": target.chip,
        "device": device.device_kind,
        "platform_version": getattr(getattr(device, "client", None), "platform_version", None),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "gpu": smi("name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"),
        "cpu_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "versions": {"python": platform.python_version()}
        | {n: v for n in PACKAGES if (v := installed(n))},
        "xla_flags": os.environ.get("XLA_FLAGS"),
        # A copy without .git gets it from the caller.
        "commit": commit or os.environ.get("JAXFP8_COMMIT") or git("rev-parse", "HEAD"),
        "changed_files": changed_files(),
    }


def changed_files() -> int | None:
    """How many files differ from the commit. None if git cannot say."""
    if git("rev-parse", "HEAD") is None:
        return None
    return len((git("status", "--porcelain", "--untracked-files=no") or "").splitlines())


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def smi(fields: str) -> dict[str, str] | None:
    """Fields that nvidia-smi shows of the first GPU. This only queries; it changes no setting."""
    if shutil.which("nvidia-smi") is None:
        return None
    said = output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0")
    return said and dict(zip(fields.split(","), map(str.strip, said.split(",")), strict=False))


def git(*arguments: str) -> str | None:
    return output("git", "-C", str(Path(__file__).parent), *arguments)


def output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def memory(device: Any) -> dict[str, int] | None:
    """Figures of the device's allocator so far, in bytes."""
    stats = device.memory_stats() or {}
    return {
        name: stats[name] for name in ("peak_bytes_in_use", "bytes_limit") if name in stats
    } or None


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes the JSON file. A run may end while it writes, so the file is renamed at the end."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


def markdown(result: dict[str, Any]) -> str:
    """All tables, with one for each section."""
    what = result["machine"]
    lines = [
        f"# {what['device']}",
        "",
        f"{what['chip']}, driver {(what['gpu'] or {}).get('driver_version')}, "
        + ", ".join(f"{name} {version}" for name, version in what["versions"].items()),
        "",
        f"Commit {what['commit']}, {what['changed_files']} changed files. `{result['command']}`, "
        f"{result['seconds']:.0f} s.",
        f"Medians of {result['rounds']} rounds, quartiles in brackets. {result['finished']}.",
    ]
    for section, title in TITLES.items():
        rows = [row for row in result["rows"] if row["section"] == section]
        if rows:
            lines += ["", f"## {title}", "", *TABLES.get(section, timed)(rows), *_others(rows)]
    return "\n".join(lines) + "\n"


def timed(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of timed cases, in the order of the run."""
    columns = {
        "shape": lambda r: r["group"],
        "operation": lambda r: r["operation"],
        "by": lambda r: r["contender"],
        "µs": lambda r: spread(r["seconds"], 1e6),
        "GiB/s": lambda r: f"{r['gib_per_s']:.0f}" if "gib_per_s" in r else "",
        "of the copy": lambda r: f"{r['share_of_copy']:.2f}" if "share_of_copy" in r else "",
        "TFLOP/s": lambda r: f"{r['tflops']:.0f}" if "tflops" in r else "",
        "times bf16": lambda r: spread(r["speedup"], 1, 2) if "speedup" in r else "",
        "kernels": lambda r: f"{r['kernels']:g}" if "kernels" in r else "",
        "FP8 matmuls": lambda r: f"{r['fp8_gemms']:g}" if "fp8_gemms" in r else "",
        "temporary MiB": lambda r: (
            f"{r['temporary_bytes'] / 2**20:.0f}" if "temporary_bytes" in r else ""
        ),
        "peak MiB": lambda r: (
            f"{r['peak_bytes'] / 2**20:.0f}"
            if r["section"] in ("layers", "steps") and r.get("peak_bytes")
            else ""
        ),
    }
    return table(columns, [row for row in rows if row["status"] == "ok"])


def checked(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "input": lambda r: r["group"],
        "operation": lambda r: r["operation"],
        "by": lambda r: r["contender"],
        "found": lambda r: (
            f"{r['distance']:.1e} of {r['bound']:.1e}" if "distance" in r else "the same bits"
        ),
        "on poisoned memory": lambda r: f"{r['poisoned']:.0%}",
    }
    return table(columns, [row for row in rows if row["status"] == "ok"])


def compiled(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "program": lambda r: f"{r['group']}, {r['operation']}, {r['contender']}",
        "kernels": lambda r: f"{r['kernels']:g}" if "kernels" in r else "",
        "FP8 matmuls": lambda r: f"{r['fp8_gemms']:g}",
        "temporary MiB": lambda r: f"{r.get('temporary_bytes', 0) / 2**20:.0f}",
        "s": lambda r: f"{r['compile_seconds']:.1f}",
    }
    return table(columns, [row for row in rows if row["status"] == "compiled"])


def _others(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of cases without results.

    They are the cases that were only compiled, and those that failed or were skipped, with the
    reason. Shapes with the same reason share one line.
    """
    lines = compiled(rows) if any(row["status"] == "compiled" for row in rows) else []
    same: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if "reason" in row:
            key = row["status"], row["operation"], row["contender"], row["reason"]
            same.setdefault(key, []).append(row["group"])
    listed = [
        f"- {what[0]}: {', '.join(what[1:3])}: {what[3]} ({', '.join(groups)})"
        for what, groups in same.items()
    ]
    return [*lines, *[""] * bool(listed), *sorted(listed)]


def table(columns: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """A Markdown table. Columns without any text are left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    cells = {name: column for name, column in cells.items() if any(column)}
    if not rows:
        return []
    lines = ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]
    return lines + ["| " + " | ".join(row) + " |" for row in zip(*cells.values(), strict=True)]


def spread(figures: dict[str, Any], unit: float, digits: int = 1) -> str:
    low, high = figures["quartiles"]
    median, low, high = (f"{unit * x:.{digits}f}" for x in (figures["median"], low, high))
    return f"{median} ({low} to {high})"


TITLES = {
    "checks": "Checks against the reference",
    "copies": "Copying on the device",
    "casts": "Casts",
    "matmuls": "Matmuls of operands in FP8",
    "layers": "Dense layers of a block, forward and backward, with casts",
    "steps": "Train steps of blocks",
    "experts": "Layers of experts, forward and backward, with casts",
}
TABLES = {"checks": checked}


def one_line(error: Exception) -> str:
    """An error in one line, for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
