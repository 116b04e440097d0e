"""XLA's flags for processes that tests start: benchmarks, and flax's own tests."""

import os


def flags() -> str:
    """Those of the tests, without their eight devices."""
    given = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in given if "device_count" not in flag)


def quick_flags() -> str:
    """`flags`, and LLVM does not optimize.

    Where the CUDA wheels are installed, the tests keep the optimizations (`conftest.py`). These
    processes compile much and compute little. No test compares their bits with those of others.
    Programs for GPUs read the same flag, so a process that compiles them does not take it.
    """
    if "xla_backend_optimization_level" in flags():
        return flags()
    return f"{flags()} --xla_backend_optimization_level=0".strip()
