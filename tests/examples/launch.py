"""Examples with this checkout's package: as users run them, in processes; or as modules."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def environment() -> dict[str, str]:
    """On CPUs; as many devices as the example itself asks for, which is one by default.

    Compiled as the tests are, not as users compile, which takes several times as long.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = " ".join(flag for flag in flags if "device_count" not in flag)  # conftest's eight
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / script), *map(str, arguments)]


def load(script: str) -> ModuleType:
    """A module of its own, and those that it imports of its folder, so that a test may change what
    is in them.
    """
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), EXAMPLES / script)
    module = importlib.util.module_from_spec(spec)
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))  # where it finds what it imports
        spec.loader.exec_module(module)
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)
    return module


def run(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """A new process."""
    return subprocess.run(
        command(script, *arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def start_together(
    script: str, *arguments: object, processes: int, cwd: Path
) -> list[subprocess.Popen]:
    """Processes that find each other on a free port. Process I writes to processI.log."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for i in range(processes):
        ours = "--coordinator", f"localhost:{port}", "--num-processes", processes, "--process-id", i
        with (cwd / f"process{i}.log").open("w") as file:
            options = {"cwd": cwd, "env": environment(), "stdout": file, "stderr": file}
            started.append(subprocess.Popen(command(script, *ours, *arguments), **options))
    return started


def kill(started: list[subprocess.Popen]) -> list[int | None]:
    """Their exit codes until now; none of them is left running."""
    codes = [process.poll() for process in started]
    for process in started:
        process.kill()
        process.wait()
    return codes


def run_together(
    script: str, *arguments: object, processes: int, cwd: Path, seconds: float
) -> list[str]:
    """What each process wrote, once all are well done.

    Raises:
      AssertionError: if one fails or time is over, with what they wrote.
    """
    deadline = time.monotonic() + seconds
    started = start_together(script, *arguments, processes=processes, cwd=cwd)
    try:
        # One that fails leaves the others waiting for it.
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            if any(process.poll() not in (None, 0) for process in started):
                break
            time.sleep(0.1)
    finally:
        codes = kill(started)
    written = [(cwd / f"process{i}.log").read_text() for i in range(processes)]
    assert codes == [0] * processes, (
        f"exit codes {codes} (None: killed after {seconds} s)\n" + "\n".join(written)
    )
    return written
