"""The dispatch loop, what runs on other platforms, and the chips that FP8 code is written for.

`plan/` decides which backends are tried, and in which order. Here they are only names.
"""

import contextlib
import contextvars
import dataclasses
import enum
import functools
import importlib
import itertools
import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.lax import platform_dependent
from jax.sharding import AbstractMesh

from jaxfp8._check import check_one_of
from jaxfp8.sharding._amax import varying_axes, varying_axes_of_type

# A kernel for one platform and its replacement on the others, in one program.
#
# A program that is written for a GPU can be debugged on a CPU without a change. XLA compiles only
# the branch of the platform. The kernel is traced on every platform, so what it needs must be
# installed.


# `inline`: the caller's program has the operations, without a call.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def traced_once(run: Callable[..., Any], config: Hashable, *operands: Any) -> Any:
    """`run(config, *operands)`. Equal calls are traced once in a process.

    JAX keeps the trace by `run`, `config`, the operands' types, the mesh and JAX's settings. A
    program lowers a kernel once for each trace. Without `traced_once` each call would have a trace
    of its own. `run` and `config` must be hashable and hold no arrays.
    """
    return run(config, *operands)


def _on_platform(
    platform: str,
    kernel: Callable[..., Any],
    elsewhere: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`kernel(*args, **kwargs)` on a platform, `elsewhere(like, *args, **kwargs)` on the others.

    Both return trees of arrays of the same structure, shapes and dtypes. `like` is that tree, with
    `jax.ShapeDtypeStruct`s as leaves. Leaves of arguments that are not arrays are hashable.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
    others = (None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
    call = _PlatformCall(platform, kernel, elsewhere, structure, tuple(others))
    return traced_once(_PlatformCall.run, call, *itertools.compress(leaves, is_array))


@dataclasses.dataclass(frozen=True)
class _PlatformCall:
    """A call of `_on_platform` without its arrays. Hashable."""

    platform: str
    kernel: Callable[..., Any]
    elsewhere: Callable[..., Any]
    # The structure and the leaves of `(args, kwargs)`. In place of an array there is None.
    structure: Any
    leaves: tuple[Any, ...]

    def run(self, *arrays: jax.Array) -> Any:
        """The result of the call with these arrays."""
        given = iter(arrays)
        leaves = [next(given) if leaf is None else leaf for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        # The kernel is traced before the choice of a platform, because `elsewhere` needs the types
        # of its results. The branch of the platform runs this trace.
        traced, like = jax.make_jaxpr(lambda: self.kernel(*args, **kwargs), return_shape=True)()
        of_results: Any = jax.tree.structure(like)

        def other() -> list[Any]:
            results = self.elsewhere(like, *args, **kwargs)
            assert of_results == jax.tree.structure(results), (results, like)
            leaves = jax.tree.leaves(results)
            return [_as(x, aval) for x, aval in zip(leaves, traced.out_avals, strict=True)]

        # Branches without operands: `platform_dependent` takes arrays only, and arguments are trees
        # with static leaves.
        results = platform_dependent(default=other, **{self.platform: jaxpr_as_fun(traced)})
        return jax.tree.unflatten(of_results, results)


def _as(x: jax.Array, aval: Any) -> jax.Array:
    """x with the mesh axes of a type: those over which it varies, and those that split it.

    The branches of `platform_dependent` must return equal types.
    """
    if missing := varying_axes_of_type(aval) - varying_axes(x):
        x = lax.pcast(x, tuple(sorted(missing)), to="varying")
    mesh = aval.sharding.mesh
    if not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types:
        x = jax.sharding.reshard(x, aval.sharding)
    return x


# The dispatch loop: the one place that calls a backend of an operation.

Attempt: TypeAlias = tuple[str, Mapping[str, Any]]
"""The name of a backend, and the extra arguments that it gets."""


class Dispatched(NamedTuple):
    """The attempt that did a case, and the reasons of backends that could not."""

    attempt: str | Attempt
    refusals: Mapping[str, str]

    @property
    def backend(self) -> str:
        """The name of the backend that did the case."""
        return self.attempt if isinstance(self.attempt, str) else self.attempt[0]


_RECORD: contextvars.ContextVar[list[Dispatched] | None] = contextvars.ContextVar(
    "jaxfp8 dispatched", default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[list[Dispatched]]:
    """The list of what is dispatched in this context, where it is traced. It is not logged."""
    record: list[Dispatched] = []
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def dispatch(
    operation: str,
    backends: Mapping[str, Callable[..., Any]],
    attempts: Iterable[str | Attempt],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the first backend that can do the case.

    A backend that cannot do the case raises NotImplementedError with the reason. Then the next one
    is tried, and the logger "jaxfp8" warns of each reason once. The error of an only backend is
    raised. If none of several can, an ExceptionGroup has every reason.

    Args:
      operation: its name, for messages.
      backends: name -> function of `args` and `kwargs`.
      attempts: names of backends, best first. A name may come with extra arguments.
      *args: for the backend.
      **kwargs: for the backend.
    """
    attempts, record = tuple(attempts), _RECORD.get()
    reasons: list[tuple[str, NotImplementedError]] = []
    for attempt in attempts:
        name, told = (attempt, {}) if isinstance(attempt, str) else attempt
        try:
            if name not in backends:
                raise NotImplementedError(
                    f"There is no backend {name!r} of {operation}, only {sorted(backends)}. Name "
                    "one of these."
                )
            result = backends[name](*args, **kwargs, **told)
            if record is not None:
                record.append(Dispatched(attempt, {by: str(reason) for by, reason in reasons}))
            return result
        except NotImplementedError as reason:
            reasons.append((name, reason))
            if len(attempts) > 1 and record is None:
                _say(f"{operation}: {name} cannot do a case, another backend does it: {reason}")
    if len(reasons) == 1:
        raise reasons[0][1]
    raise ExceptionGroup(
        f"no backend of {operation} can do this case",
        [NotImplementedError(f"{name}: {reason}") for name, reason in reasons],
    )


@functools.lru_cache(maxsize=4096)
def _say(what: str) -> None:
    """Log a message once. `plan/` chooses by shape, so it cannot foresee every case of a layer."""
    logging.getLogger("jaxfp8").warning(what)


# Backends: the rows of the table of an operation.


class Route(enum.Enum):
    """How a matmul is computed. The value is its text in tables."""

    PLAIN = "bf16"
    DEQUANTIZED = "bf16, operands dequantized"
    DEQUANTIZED_ROWS = "bf16, then a pass for scales of rows"
    WIDENED = "bf16, operands widened in the matmul"
    FOLDED = "bf16, scales of tiles folded in"
    TILE_BY_TILE = "bf16, tile by tile"
    FP8 = "FP8"
    FP8_ROWS = "FP8, then a pass for scales of rows"
    BLOCK_SCALED = "FP8, block-scaled"
    HOPPER_PALLAS = "FP8, scaled by the Pallas kernel"

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel for the chip multiplies. Otherwise XLA's program does."""
        return self in (Route.BLOCK_SCALED, Route.HOPPER_PALLAS)

    @property
    def in_fp8(self) -> bool:
        """Whether the FP8 units of the chip multiply."""
        return self.by_kernel or self in (Route.FP8, Route.FP8_ROWS)

    @property
    def reads_fp8(self) -> bool:
        """Whether the route reads FP8 values. Otherwise it reads bfloat16 values."""
        return self.in_fp8 or self in (Route.TILE_BY_TILE, Route.WIDENED)


@dataclasses.dataclass(frozen=True)
class Backend:
    """A row of the table of an operation. Its key in the table is the name that users write.

    `plan/` chooses by these fields, not by names. Only "xla" is named: it can do every case.

    `import jaxfp8` does not import Pallas, because Pallas would take most of the import's time
    (`benchmarks/structure/import_time.py`). Also, Pallas of jax 0.10 needs absl, which jax does not
    install. So a kernel is given by names, and the first call imports `module`. If that fails, the
    call raises NotImplementedError. `tests/test_floors.py` reads `module` as an import.

    Attributes:
      module: what has `function`, if that is a name.
      function: the function, or its name in `module`.
      needs: what must be installed, for the message.
      platform: the platform that runs the function: "any", or jax's name.
      elsewhere: what other platforms run, see `_on_platform`. None: the same function.
      families: the families of chips that it is written for. Empty: every chip of the platform.
      route: of a matmul: how it multiplies, which decides its cost. None: as XLA does.
      estimated: of a cast: whether `plan/` knows its cost, that of one pass over the tensor. Other
        kernels cast only if the user names them.
      writes_transposed: of a cast: whether it writes a copy transposed if its direction says so.
      takes: of a grouped matmul: which scales operands may have.
      in_place: of a grouped matmul: whether it reads the rows of groups where they are. Operands
        then have one row in a tile, so all three matmuls of a layer must be of this kind.
      tilings: of a matmul: gives every `tiling=` that it takes, for timings.
      rows: of a cast and of a grouped matmul: tiles of rows must be multiples of it. Of a kernel
        that reads rows where they are: how many it multiplies at once.
    """

    module: str | None = None
    function: Callable[..., Any] | str = ""
    _: dataclasses.KW_ONLY
    needs: str = ""
    platform: Literal["any", "cuda", "rocm", "tpu"] = "any"
    elsewhere: Callable[..., Any] | None = None
    families: tuple[str, ...] = ()
    route: Route | None = None
    estimated: bool = False
    writes_transposed: bool = False
    takes: tuple[Literal["tensors", "rows", "tiles"], ...] = ("tensors", "rows", "tiles")
    in_place: bool = False
    tilings: Callable[[], Iterable[Any]] | None = None
    rows: int = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.platform != "any":
            _refuse_symbols(args)
        function = self._imported()
        if self.elsewhere is None:
            return function(*args, **kwargs)
        return _on_platform(self.platform, function, self.elsewhere, *args, **kwargs)

    def _imported(self) -> Callable[..., Any]:
        if callable(self.function):
            return self.function
        try:
            module = importlib.import_module(str(self.module))
        except ImportError as error:
            # An import error inside jaxfp8 is a bug. Do not try the next backend.
            if (error.name or "").partition(".")[0] == __name__.partition(".")[0]:
                raise
            raise NotImplementedError(f"{self.needs} cannot be imported: {error}") from error
        function: Callable[..., Any] = getattr(module, self.function)
        return function


def _refuse_symbols(args: Any) -> None:
    """Raise NotImplementedError if an array has a size that is no number."""
    # A grid of a kernel is a number. Without this check, Pallas' own errors do not say so.
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.Array) and not all(isinstance(size, int) for size in leaf.shape):
            raise NotImplementedError(
                f"an operand of shape {list(leaf.shape)} has a symbolic size, and kernels need "
                "numbers. Leave this backend out of kernels=, or export the program once for each "
                "size."
            )


def kernels_of(chip: "Chip", backends: Mapping[str, Backend]) -> tuple[str, ...]:
    """The names of the backends of a table that are written for the family of a chip."""
    return tuple(name for name, row in backends.items() if chip.family in row.families)


# The chips that FP8 code is written for. The user names a chip; nothing detects it.


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip and what it can do.

    Attributes:
      name: the name that users write.
      platform: jax's platform name.
      family: the name of its architecture, as messages write it. Kernels are written for a family.
      compute_capability: (major, minor) of an NVIDIA GPU; None for other chips.
    """

    name: str
    platform: Literal["cpu", "cuda", "rocm", "tpu"]
    family: str
    compute_capability: tuple[int, int] | None = None

    @property
    def fp8_matmul(self) -> bool:
        """Whether XLA can multiply E4M3 in the hardware of this chip."""
        # cuBLASLt multiplies FP8 from compute capability 8.9 on (cuBLAS documentation, "8-bit
        # floating point"). ROCm has FP8 units, too. But nothing here was compiled or run for it, so
        # it takes the portable path. Of TPUs before 7x, XLA widens E4M3 inside of the matmul. Their
        # matrix units read E5M2 (the compiler's instruction is `vmatmul.f8e5m2.bf16`), but no
        # preset multiplies two operands in E5M2, and data sheets give no rate.
        if self.platform == "tpu":
            return self.family == "Ironwood"
        return self.compute_capability is not None and self.compute_capability >= (8, 9)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("cpu", "cpu", "CPU"),
        Chip("a100", "cuda", "Ampere", (8, 0)),
        Chip("l4", "cuda", "Ada", (8, 9)),
        Chip("l40s", "cuda", "Ada", (8, 9)),
        Chip("h100", "cuda", "Hopper", (9, 0)),
        Chip("h200", "cuda", "Hopper", (9, 0)),
        Chip("b200", "cuda", "Blackwell", (10, 0)),
        Chip("mi300x", "rocm", "CDNA 3"),
        Chip("tpu7x", "tpu", "Ironwood"),
        Chip("v6e", "tpu", "Trillium"),
        Chip("v5p", "tpu", "TPU v5p"),
        Chip("v5e", "tpu", "TPU v5e"),
    )
}


def chip_named(name: str) -> Chip:
    """The chip with this name. ValueError for a name that is not in `CHIPS`."""
    if name == "tpu":
        tpus = ", ".join(repr(chip.name) for chip in CHIPS.values() if chip.platform == "tpu")
        raise ValueError(
            f"chip='tpu' names no chip: generations of TPUs differ in what they multiply. Use one "
            f"of {tpus}, or leave the chip out."
        )
    check_one_of("chip", name, sorted(CHIPS))
    return CHIPS[name]


def compute_capability_of(mesh: AbstractMesh) -> int | None:
    """The compute capability of a mesh's GPUs, as one number: 90 for an H200.

    A program can be compiled for a mesh of GPUs that this machine does not have. So the mesh is
    asked, not the driver. The result is None if the mesh names no NVIDIA GPU of `CHIPS`. Then
    jax-triton asks the GPU.
    """
    kind = mesh.abstract_device.device_kind if mesh.abstract_device is not None else ""
    for word in re.split(r"[ -]", kind.lower()):
        if word in CHIPS and (version := CHIPS[word].compute_capability):
            return 10 * version[0] + version[1]
    return None
