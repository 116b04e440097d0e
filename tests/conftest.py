"""The machine that every test sees: eight CPU devices, no silent promotion."""

import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before jax is imported, or it has no effect. A GPU run says JAX_PLATFORMS=cuda; what the caller
# set, stays.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "0")
# Lets the CUDA plugin register without a driver, so that tests/deviceless can compile for a GPU
# that is not there.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Lets libtpu compile for a TPU that is not there (tests/tpu). Otherwise it asks the network what
# machine this is, for minutes.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# jax-triton checks kernels with the first ptxas on PATH; that of the CUDA wheels knows what it
# writes.
if (wheels := importlib.util.find_spec("nvidia")) is not None:
    for folder in wheels.submodule_search_locations or ():
        os.environ["PATH"] = f"{folder}/cu13/bin{os.pathsep}{os.environ['PATH']}"
# Eight devices make a 4 x 2 mesh: the smallest on which two axes differ in size.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )
# Most of the suite's time is compiling. Workers and runs share what they compile, in this folder.
# Delete it when it is too large.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# For many small programs it is faster to compile each of them in one piece.
if os.environ["JAX_PLATFORMS"] == "cpu" and "codegen_split_count" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# On CPUs XLA compiles in half of the time without LLVM's optimizations and with its older emitters.
# Both may change bits: LLVM contracts a product and a sum. So an environment with the plugin of
# CUDA 13 leaves the optimizations as users have them. nox runs the arithmetic in both.
if (
    os.environ["JAX_PLATFORMS"] == "cpu"
    and "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]
    and importlib.util.find_spec("jax_cuda13_plugin") is None
):
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    # jaxlib 0.11 has no older emitters, and ends a process at a flag that it does not know.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import hypothesis
import jax
import pytest

# Traces are millions of objects that mostly stay: at Python's own thresholds a tenth of the time
# goes into looking through them for garbage again and again.
gc.set_threshold(200_000, 20, 20)

# A float32 that slips in doubles the traffic and hides in every result: promotion must be written
# down.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles, the next ones do not.
hypothesis.settings.register_profile("local", deadline=None, max_examples=25)
# In CI the same examples every time, so that a failure is the fault of the change under test.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-row-in",
        type=int,
        default=1,
        metavar="N",
        help="keep about one row in N, always the same ones: at least one of each test, and at "
        "least one slow row of each file",
    )
    parser.addoption(
        "--flax-sdist", metavar="FILE", help="flax's source distribution, for tests/guests"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`-n` alone gives each worker its share in one piece, so that tests of a file share traces.

    As `--dist worksteal` does. In `addopts` that option would need xdist in every run.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


# `--one-row-in` keeps one row in so many of these, or more. Kernels of Pallas and Triton run on the
# newest jax only, and golden bits are a claim about every jax.
AT_LEAST_ONE_IN = {"golden": 1, "kernels": 4}


@pytest.hookimpl(trylast=True)  # of the rows that -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    one_in = config.getoption("--one-row-in")
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        test, file = item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
        slow = item.get_closest_marker("slow") is not None
        tables.setdefault(f"{file} slow" if slow else test, []).append(item)
    # By a hash, as every N-th of a product of parameters may have always the same value of one. The
    # hash leaves out the name of the test, so that tests of a file read the same programs.
    draw = lambda item: zlib.crc32(f"{item.path.name}[{item.nodeid.partition('[')[2]}".encode())
    kept = {
        item
        for rows in tables.values()
        for item in rows
        if draw(item) % _one_in(item, one_in) == 0 or item is min(rows, key=draw)
    }
    if dropped := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item in kept]


def _one_in(item: pytest.Item, asked: int) -> int:
    if item.get_closest_marker("deviceless"):
        return asked
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    return min(asked, AT_LEAST_ONE_IN.get(room, asked))


def pytest_configure() -> None:
    # Otherwise a session whose environment lost a package skips all of its tests, and passes.
    needed = os.environ.get("JAXFP8_TESTS_NEED", "").split()
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise pytest.UsageError(f"JAXFP8_TESTS_NEED names {missing}, which cannot be imported.")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (
        item.get_closest_marker("deviceless")
        and importlib.util.find_spec("jax_cuda13_plugin") is None
    ):
        pytest.skip("needs the CUDA wheels, not a GPU: pip install 'jax[cuda13]'")
    if item.get_closest_marker("tpu") and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu, not a TPU: pip install 'jaxfp8[tpu]'")


MOST_BYTES = 2**30
"""The memory of a process above which the programs of the previous files are dropped."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # Each program stays in memory for as long as JAX knows it. Without this, a worker grows to
    # 6 GB, and `-n auto` does not fit on a laptop. Files share few programs.
    between_files = nextitem is not None and nextitem.path != item.path
    if between_files and _resident_bytes() > MOST_BYTES:
        jax.clear_caches()
        gc.collect()
        # Otherwise glibc keeps what is freed, and each later file would drop its programs, too.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    """The memory of this process now; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except FileNotFoundError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """JAX's default promotion, for the code of others.

    `optax.adam` raises a float to its int32 step count.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
