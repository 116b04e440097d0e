"""`Choices`: what each cast and each matmul of a layer runs, and why, as a table.

Each kernel is traced for its case. If it cannot do the case, the table shows the reason.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxfp8._geometry import OPERANDS
from jaxfp8._typing import Array, DType, Matmul, Tensor
from jaxfp8.kernels._dispatch import Route, chip_named
from jaxfp8.kernels.scaled_matmul._api import multiply
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._amax import amax
from jaxfp8.plan._backends import XLA, Backends, cast_seconds, matmul_seconds, matmul_sizes
from jaxfp8.plan._cast_costs import MATRICES
from jaxfp8.plan._costs import MATMULS, Shape, route_of, sides_of
from jaxfp8.quantizers._base import ScaleInputs
from jaxfp8.recipes._recipe import PlannedCast, Recipe, plan_casts

_TENSORS: tuple[Tensor, ...] = ("x", "w", "g")
_ALONE = "no other kernel is considered"
Evidence: TypeAlias = Literal["measured", "estimated", "compiled"]


class Footnotes:
    """Texts that many rows of a table have. The table says each of them once, below its rows."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def shorten(self, text: str, notes: Iterable[str]) -> str:
        """The text with a number in the place of each note."""
        for note in notes:
            number = self._numbers.setdefault(note, len(self._numbers) + 1)
            for separator in ",;":
                text = text.replace(f"{separator} {note}", f" [{number}]")
        return text

    def lines(self) -> list[str]:
        """The notes, each with its number."""
        return [f"[{number}] {note}" for note, number in self._numbers.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What one cast or one matmul runs.

    Attributes:
      backend: its name, "xla" or that of a kernel.
      evidence: how the backend was chosen. "measured": by timings on the chip. "estimated": from
        figures of the chip (`fp8.plan.roofline`). "compiled": by neither. Then the user named the
        backend, or there was nothing to compare. The table calls this column "known by".
      why: the reason. An estimate has its time and the times of the alternatives. If a kernel
        cannot do the case, its reason follows.
      notes: parts of `why` that other rows may have, too. The table says them once.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.Kernels().choices(fp8.recipes.current(), (512, 512, 512)).fprop
      Choice(backend='xla', evidence='compiled', why='for every chip')
    """

    backend: str
    evidence: Evidence
    why: str
    notes: tuple[str, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What the casts and matmuls of a layer run. `str()` is a table.

    Attributes:
      title: names of the recipe, the shape and the kernels.
      x: the casts of x.
      w: the casts of w.
      g: the casts of the gradient of y.
      fprop: y = x @ w.
      dgrad: dx = g @ w^T.
      wgrad: dw = x^T @ g.

    Example:
      >>> import jaxfp8 as fp8
      >>> choices = fp8.Kernels("h200").choices(fp8.recipes.mxfp8(), (8192, 4096, 4096))
      >>> choices.dgrad.evidence
      'estimated'
    """

    title: str
    x: Choice
    w: Choice
    g: Choice
    fprop: Choice
    dgrad: Choice
    wgrad: Choice

    def __str__(self) -> str:
        parts = {f"cast {name}": getattr(self, name) for name in _TENSORS}
        parts |= {name: getattr(self, name) for name in MATMULS}
        rows, notes = [("part", "backend", "known by", "why")], Footnotes()
        for name, c in parts.items():
            rows.append((name, c.backend, c.evidence, notes.shorten(c.why, c.notes)))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join(f"{word:{width}}" for word, width in zip(row, [*widths, 0], strict=True))
            for row in rows
        ]
        return "\n".join([self.title, *lines, *notes.lines()])


class _Refusals(dict[str, str]):
    """Names of backends that cannot do a case, each with its reason."""

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{name} cannot: {reason}" for name, reason in self.items())

    def __str__(self) -> str:
        return "".join(f"; {note}" for note in self.notes)


class _Tried(NamedTuple):
    """The first backend that can do a case, and those before it that cannot."""

    backend: str
    refusals: _Refusals


def _first_that_can(names: Sequence[str], trace: Callable[[str], Any]) -> _Tried:
    refusals = _Refusals()
    for name in names:
        if name == "xla":
            break  # XLA can do every case, so tracing it would only take time
        try:
            trace(name)
            return _Tried(name, refusals)
        except NotImplementedError as reason:
            if len(names) == 1:  # the user named this backend, so no other may replace it
                raise
            refusals[name] = str(reason)
    return _Tried("xla", refusals)


def explain_choices(kernels: Any, recipe: Recipe, shape: Shape, dtype: DType) -> Choices:
    """See `fp8.Kernels.choices`; `kernels` are `fp8.Kernels`."""
    return _in_mesh(jax.sharding.get_abstract_mesh(), kernels, recipe, shape, dtype)


# A model has many layers and few shapes. The mesh is a key of the cache, because it decides what
# kernels can do.
@functools.lru_cache(maxsize=4096)
def _in_mesh(mesh: Any, kernels: Any, recipe: Recipe, shape: Shape, dtype: DType) -> Choices:
    del mesh
    names: Backends = kernels.backends(recipe, shape)
    m, k, n = shape
    sizes: dict[Tensor, tuple[int, int]] = {"x": (m, k), "w": (k, n), "g": (m, n)}
    copies: dict[Tensor, Callable[[str], dict[Matmul, Any]]] = {}
    casts: dict[Tensor, _Tried] = {}
    for tensor, size_of in sizes.items():
        array = jax.ShapeDtypeStruct(size_of, dtype)
        copies[tensor] = functools.cache(functools.partial(_copies, recipe, tensor, array))
        casts[tensor] = _first_that_can(getattr(names, tensor), copies[tensor])
    chosen: dict[str, Choice] = {}
    routes: dict[Matmul, Route] = {}
    for name, size in matmul_sizes(shape).items():
        operands = [functools.partial(copies[t], casts[t].backend) for t in OPERANDS[name]]
        chosen[name], routes[name] = _matmul(kernels, recipe, name, size, operands, dtype, names)
    for tensor, tried in casts.items():
        if all(quantizer.value_format is None for _, quantizer in recipe.uses(tensor)):
            chosen[tensor] = Choice(backend="xla", evidence="compiled", why="in high precision")
            continue
        seconds = {}
        if kernels.chip is not None:
            seconds = cast_seconds(recipe, tensor, kernels.chip, shape, routes)
        chosen[tensor] = _choice(kernels, kernels.casts, tried, seconds)
    return Choices(title=f"{recipe.name}, [{m}, {k}] @ [{k}, {n}], {kernels!r}", **chosen)


def _copies(
    recipe: Recipe, tensor: Tensor, array: jax.ShapeDtypeStruct, backend: str
) -> dict[Matmul, Any]:
    """The copy of a tensor that each matmul reads, if a backend casts it."""
    copies: dict[Matmul, Any] = {}
    for planned in plan_casts(recipe, MATRICES, tensor, (backend,)):
        made: Any = (array,)
        if planned.cast is not None:
            made = jax.eval_shape(functools.partial(_quantized, planned), array)
        for copy, readers in zip(made, planned.readers, strict=True):
            copies |= dict.fromkeys(readers, copy)
    return copies


def _quantized(planned: PlannedCast, x: Array) -> Any:
    """The copies that a quantizer makes on one device, in a step after the first one."""
    assert planned.cast is not None
    stored = jnp.float32(1) if planned.quantizer.stateful else None
    key = jax.random.key(0) if planned.cast.rounding == "stochastic" else None
    inputs = ScaleInputs(functools.partial(amax, x), stored, True)
    return planned.quantizer.quantize(x, planned.cast, inputs, key=key)[0]


def _matmul(
    kernels: Any,
    recipe: Recipe,
    name: Matmul,
    size: Shape,
    operands: Sequence[Callable[[], dict[Matmul, Any]]],
    dtype: DType,
    names: Backends,
) -> tuple[Choice, Route]:
    """The choice of a matmul, and its route. `operands` trace the casts of its operands."""
    sides = sides_of(getattr(recipe, name))
    chip = chip_named("cpu" if kernels.chip is None else kernels.chip)
    if not all(side.in_fp8 for side in sides):
        choice = Choice(backend="xla", evidence="compiled", why="in high precision")
        return choice, route_of(sides, "xla", chip, size)
    # `ops/` calls the matmul in the same way: only fprop accumulates fast.
    call = MatmulCall(
        geometry=getattr(MATRICES, name), out_dtype=dtype, fast_accumulation=name == "fprop"
    )
    attempts: tuple[Any, ...] = getattr(names, name)
    if kernels.timings is not None or attempts != XLA:
        lhs, rhs = (copies()[name] for copies in operands)
        attempts = kernels.attempts(attempts, lhs, rhs, call)
    by_name = {way if isinstance(way, str) else way[0]: way for way in reversed(attempts)}

    def trace(backend: str) -> Any:
        attempt = (by_name[backend],)
        return jax.eval_shape(lambda lhs, rhs: multiply(lhs, rhs, call, attempt), lhs, rhs)

    tried = _first_that_can([*reversed(by_name)], trace)
    route = route_of(sides, tried.backend, chip, size)
    if not isinstance(by_name[tried.backend], str):
        why = f"the fastest of its timings{tried.refusals}"
        return Choice(
            backend=tried.backend, evidence="measured", why=why, notes=tried.refusals.notes
        ), route
    seconds = {}
    if kernels.chip is not None:
        seconds = matmul_seconds(sides, kernels.chip, size, recipe.tile)
    return _choice(kernels, kernels.matmuls, tried, seconds, route.value), route


def _choice(
    kernels: Any, named: str | None, tried: _Tried, seconds: Mapping[str, float], how: str = ""
) -> Choice:
    """The choice of a backend by its name, by an estimate, or because there is no other."""
    backend, refusals = tried
    evidence: Evidence = "compiled"
    notes: list[str] = []
    if named is not None:
        why = "asked for by name"
    elif kernels.chip is None:
        why = "for every chip"
    elif backend not in seconds:
        why = "nothing is known to estimate from"
    else:
        evidence = "estimated"
        why = f"{1e6 * seconds[backend]:.1f} us"
        if how:
            why += f", {how}"
            notes += filter(None, [how.partition(", ")[2]])
        others = [name for name in seconds if name != backend and name not in refusals]
        why += "".join(f"; {name} {1e6 * seconds[name]:.1f} us" for name in others)
        if len(seconds) == 1:
            why += f"; {_ALONE}"
            notes.append(_ALONE)
    notes += refusals.notes
    return Choice(backend=backend, evidence=evidence, why=f"{why}{refusals}", notes=tuple(notes))
