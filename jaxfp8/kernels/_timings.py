"""`Timings`: measured times of the ways to do each matmul, and how they are measured.

`fp8.plan.autotune` makes them. They can be saved and loaded. They are used only if they are given
as an argument. So all processes and devices with the same timings compile the same program.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, PyTree
from jaxfp8.kernels._dispatch import chip_named
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul.hopper._tiling import NoRoomError, Tiling

_SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to do a matmul."""

    backend: str  # its name in `kernels.scaled_matmul._api.BACKENDS`
    tiling: Tiling | None = None  # of a backend that has tilings, which chooses one for None

    def __post_init__(self) -> None:
        # Timings of another version may name a backend that is no more.
        row = BACKENDS.get(self.backend)
        if self.tiling is not None and (row is None or row.tilings is None):
            raise ValueError(
                f"backend={self.backend!r} takes no tiling; got {self.tiling!r}. Leave tiling= out."
            )

    @property
    def options(self) -> dict[str, Any]:
        """Extra arguments of the backend."""
        return {} if self.tiling is None else {"tiling": self.tiling}

    def __str__(self) -> str:
        fields = {} if self.tiling is None else dataclasses.asdict(self.tiling)
        return " ".join([self.backend, *(f"{name}={value}" for name, value in fields.items())])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Time:
    """How long a way takes: the median of one matmul in seconds, and its quartiles."""

    way: Way
    seconds: float
    quartiles: tuple[float, float]

    def __post_init__(self) -> None:
        seconds = self.seconds, *self.quartiles
        if not all(0 <= each < math.inf for each in seconds):
            raise ValueError(f"times of {seconds} s, which must be finite and not negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """The times of every way that `fp8.plan.autotune` tried, for each matmul of a step.

    `str()` is a table in Markdown.

    Give them to `fp8.Kernels(chip, timings=)`. A matmul that was timed then takes the fastest way.
    Any other matmul is chosen as without timings. Two matmuls are the same if their shapes, axes,
    formats, tiles and dtypes are. Inside `jax.shard_map`, shapes are those of one device.

    Attributes:
      chip: the name of the chip that was timed, "h200" for instance. `Kernels` of another chip
        reject the timings.
      device: the driver's name of the GPU.
      versions: name and version of jax and of other packages.
      times: a description of each matmul, with its times.

    Example:
      >>> time = Time(way=Way(backend="xla"), seconds=1e-4, quartiles=(1e-4, 1e-4))
      >>> times = (("some matmul", (time,)),)
      >>> versions = (("jax", "0.11.2"),)
      >>> timings = Timings(
      ...     chip="h200", device="NVIDIA H200", versions=versions, times=times
      ... )
      >>> timings.fastest("some matmul")
      Way(backend='xla', tiling=None)
    """

    chip: str
    device: str
    versions: tuple[tuple[str, str], ...]
    times: tuple[tuple[str, tuple[Time, ...]], ...]

    def __post_init__(self) -> None:
        chip_named(self.chip)

    def fastest(self, matmul: str) -> Way | None:
        """The way with the smallest median time; None for a matmul that was not timed."""
        return next(iter(self._ranked(matmul)), None)

    def _ranked(self, matmul: str) -> list[Way]:
        times = dict(self.times).get(matmul, ())
        return [time.way for time in sorted(times, key=lambda time: time.seconds)]

    def choose(
        self,
        lhs: QuantizedTensor,
        rhs: QuantizedTensor,
        call: MatmulCall,
        *,
        add_to: Array | None = None,
    ) -> list[tuple[str, dict[str, Any]]]:
        """The backends that were timed for this matmul, fastest first, with their tilings.

        The dispatch loop tries the next backend if one cannot do the matmul, for instance with the
        call's `out_sharding`. With `add_to` the tilings are left out, because shared memory or
        registers may not suffice for the added array.
        """
        return [
            (way.backend, way.options if add_to is None else {})
            for way in self._ranked(describe(lhs, rhs, call))
        ]

    def merged(self, other: "Timings") -> "Timings":
        """These timings and `other`. For a matmul in both, the times of `other` are kept.

        Raises:
          ValueError: if chip, device or versions differ.
        """
        for name in ("chip", "device", "versions"):
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)):
                raise ValueError(
                    f"Timings with {name}={mine!r} and with {name}={theirs!r} do not compare. "
                    "Measure all of them on one machine, with the same versions."
                )
        return dataclasses.replace(
            self, times=tuple((dict(self.times) | dict(other.times)).items())
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timings to a file, as JSON."""
        plain = {"schema": _SCHEMA} | dataclasses.asdict(self)
        plain["versions"] = dict(self.versions)
        plain["times"] = [
            # The fields of a way stand beside those of its time.
            {"matmul": matmul, "times": [each.pop("way") | each for each in times]}
            for matmul, times in plain["times"]
        ]
        Path(path).write_text(json.dumps(plain, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Timings":
        """The timings that `save` wrote.

        Raises:
          ValueError: for a file with other contents.
        """
        wrong = (
            f"{os.fspath(path)!r} has no timings of schema {_SCHEMA}; write it with Timings.save."
        )
        try:
            plain = json.loads(Path(path).read_text())
            if plain["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {plain['schema']!r}")
            times = tuple(
                (row["matmul"], tuple(map(_time, row["times"]))) for row in plain["times"]
            )
            versions = tuple(plain["versions"].items())
            return cls(chip=plain["chip"], device=plain["device"], versions=versions, times=times)
        # The file is not JSON, not UTF-8, or has other contents.
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{wrong} ({type(error).__name__}: {error})") from error

    def __str__(self) -> str:
        versions = ", ".join(map(" ".join, self.versions))
        lines = [
            f"{self.device} ({self.chip}), {versions}",
            "",
            "| matmul | way | us | quartiles |",
            "|---|---|---|---|",
        ]
        for matmul, times in self.times:
            for time in sorted(times, key=lambda time: time.seconds):
                low, high = (1e6 * q for q in time.quartiles)
                lines.append(
                    f"| {matmul} | {time.way} | {1e6 * time.seconds:.1f} | {low:.1f}, {high:.1f} |"
                )
        return "\n".join(lines)


def describe(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> str:
    """The row of a matmul in `Timings`, with everything that its time may depend on.

    It begins with 'e4m3[256,128] 1x128 float32 @ ', the format, shape, tiles and scales of lhs.
    """
    contracted, batch = (
        " with ".join(" ".join(map(str, axes)) for axes in pair)
        for pair in call.geometry.dimension_numbers
    )
    words = f"{_operand(lhs)} @ {_operand(rhs)}, contracting {contracted}"
    words += f", batch {batch}" if call.geometry.lhs.batch else ""
    return f"{words} -> {call.out_dtype.name}" + (
        ", accumulated fast" if call.fast_accumulation else ""
    )


def _operand(operand: QuantizedTensor) -> str:
    shape, granularity = ",".join(map(str, operand.shape)), operand.granularity
    scaled = (
        "x".join(map(str, granularity.along(operand.ndim)))
        if granularity.in_tiles
        else repr(granularity)
    )
    powers = " powers of two" if operand.power_of_two and operand.scale.dtype == jnp.float32 else ""
    return f"{operand.format.name.lower()}[{shape}] {scaled} {operand.scale.dtype.name}{powers}"


def _time(plain: dict[str, Any]) -> Time:
    low, high = plain["quartiles"]
    tiling = None if plain["tiling"] is None else Tiling(**plain["tiling"])
    way = Way(backend=plain["backend"], tiling=tiling)
    return Time(way=way, seconds=plain["seconds"], quartiles=(low, high))


# How many seconds programs take on a GPU.
#
# Programs run in turns and in random order, so that changes of clocks and heat affect all of them.
#
# A program is a loop. Each turn of the loop does the work on every one of several sets of inputs.
# The sets together are larger than the L2 cache, unless the inputs are very small. So a set has
# left the cache when it is used again. An `optimization_barrier` makes each piece of work depend on
# the piece before it. So XLA can neither move work out of the loop nor merge two pieces.

_TURNS = 4  # of the loop of a program
_CACHE = 2**28  # bytes of all sets together: twice the L2 of a B200 (126 MB)
_MOST_SETS = 8  # all sets of very small inputs may fit in the cache
_ROUNDS = 11
_SECONDS = 2e-2  # how long each program runs in a round


def _looped(work: Callable[..., PyTree], types: PyTree) -> Callable[..., PyTree]:
    """A program that repeats `work` `_TURNS` times for each set of arguments."""

    def program(sets: Sequence[Any]) -> PyTree:
        def turn(_: Any, carry: Any) -> Any:
            results, sets = carry
            for index, arguments in enumerate(sets):
                results, arguments = lax.optimization_barrier((results, arguments))
                results = work(*arguments)
                sets = [*sets[:index], arguments, *sets[index + 1 :]]
            return results, sets

        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(work, *types)
        )
        return lax.fori_loop(0, _TURNS, turn, (nothing, list(sets)))[0]

    return program


def _sets_of(types: PyTree) -> list[PyTree]:
    """Random arguments of these types: as many sets as exceed the L2 cache, but at most 8."""
    leaves, structure = jax.tree.flatten(types)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    count = min(math.ceil(_CACHE / max(size, 1)), _MOST_SETS)
    random = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        # FP8 values and E8M0 scales have one byte. All other arrays are scales. Scales are powers
        # of two, so that E8M0 holds them exactly.
        if leaf.dtype.itemsize == 1 and "e8m0" not in leaf.dtype.name:
            return jnp.asarray(
                (64 * random.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)
            )
        return jnp.asarray(np.exp2(random.integers(-3, 4, leaf.shape)).astype(leaf.dtype))

    return [jax.tree.unflatten(structure, map(draw, leaves)) for _ in range(count)]


def _times(
    programs: Sequence[Callable[..., Any]], arguments: Any, repetitions: int
) -> list[list[float]]:
    """Seconds of one repetition, of each compiled program in each round."""

    def once(program: Callable[..., Any], calls: int) -> float:
        start = perf_counter()
        for _ in range(calls):
            results = program(arguments)
        jax.block_until_ready(results)
        return (perf_counter() - start) / calls

    calls = [max(1, round(_SECONDS / once(program, 1))) for program in programs]
    seconds: list[list[float]] = [[] for _ in programs]
    order = np.random.default_rng(0)
    for _ in range(_ROUNDS):
        for index in order.permutation(len(programs)):
            seconds[index].append(once(programs[index], calls[index]) / repetitions)
    return seconds


# The times of every way to do one matmul, on the GPU of this process.

Operands: TypeAlias = tuple[QuantizedTensor, QuantizedTensor]

# The largest difference of two products, relative to the largest value. It allows for another order
# of addition and for the rounding to bfloat16, which is 2^-9 of a value.
_CLOSE = 2.0**-6

_MOST_THREADS = 8


def _ways(operands: Operands, call: MatmulCall, backends: Iterable[str]) -> Iterator[Way]:
    """Every way to do a matmul by these backends."""
    for backend in backends:
        tilings = BACKENDS[backend].tilings
        for tiling in (None,) if tilings is None else tilings():
            way = Way(backend=backend, tiling=tiling)
            try:
                # A backend that cannot do a case or a tiling raises before anything is compiled.
                jax.eval_shape(_multiplied_by(way, call), *operands)
            except (NotImplementedError, NoRoomError):
                continue
            yield way


def _multiplied_by(way: Way, call: MatmulCall) -> Callable[..., Array]:
    """The function that does the matmul of two operands in this way."""
    return functools.partial(BACKENDS[way.backend], call=call, **way.options)


def measure(
    matmul: str, operands: Operands, call: MatmulCall, backends: Iterable[str]
) -> tuple[Time, ...]:
    """The time of every way to do a matmul. Raises RuntimeError if a way gives a wrong result."""
    tried = list(_ways(operands, call, backends))
    sets = _sets_of(operands)

    def compiled(way: Way) -> tuple[Callable[..., Array], Callable[..., Any]]:
        work = _multiplied_by(way, call)
        program = jax.jit(_looped(work, operands))
        return jax.jit(work).lower(*sets[0]).compile(), program.lower(sets).compile()

    # There are dozens of tilings, and most of the time of `autotune` is compiling them.
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        works, programs = zip(*pool.map(compiled, tried), strict=True)
    products: dict[str, np.ndarray[Any, Any]] = {}
    for way, work, program in zip(tried, works, programs, strict=True):
        _check(matmul, way, np.asarray(work(*sets[0]), np.float32), products)
        jax.block_until_ready(program(sets))
    seconds = _times(programs, sets, _TURNS * len(sets))
    quartiles = [[float(q) for q in np.percentile(each, (25, 50, 75))] for each in seconds]
    return tuple(
        Time(way=way, seconds=middle, quartiles=(low, high))
        for way, (low, middle, high) in zip(tried, quartiles, strict=True)
    )


def _check(
    matmul: str,
    way: Way,
    product: np.ndarray[Any, Any],
    products: dict[str, np.ndarray[Any, Any]],
) -> None:
    """Compare a product of finite operands with the first one, and with that of its backend."""
    if not np.isfinite(product).all():
        raise RuntimeError(
            f"{way} gives inf or NaN for {matmul}, whose operands are finite. Report this as a bug."
        )
    first = next(iter(products.values()), product)
    if not np.max(np.abs(product - first)) <= _CLOSE * np.max(np.abs(first)):
        raise RuntimeError(
            f"{way} gives a wrong product of {matmul}: it differs from the product of "
            f"{next(iter(products))}. Report this as a bug."
        )
    # Tilings of one kernel add in the same order.
    if not np.array_equal(product, products.setdefault(way.backend, product)):
        raise RuntimeError(
            f"{way} gives other bits than another tiling, of {matmul}. All tilings must give the "
            "same bits. Report this as a bug."
        )
