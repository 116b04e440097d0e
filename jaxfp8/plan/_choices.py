"""`Choices`: what each cast and each matmul of a layer runs, and why, as a table.

The casts and matmuls of a layer are traced, and `dispatch` records what it calls.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxfp8._geometry import OPERANDS
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType, Matmul, Tensor
from jaxfp8.kernels._dispatch import Dispatched, Route, chip_named, recorded
from jaxfp8.kernels.scaled_matmul._api import multiply
from jaxfp8.numerics._amax import amax
from jaxfp8.plan._backends import XLA, Backends, cast_seconds, matmul_seconds, matmul_sizes
from jaxfp8.plan._costs import MATMULS, MATRICES, Shape, route_of, sides_of
from jaxfp8.quantizers._base import ScaleInputs
from jaxfp8.recipes._recipe import PlannedCast, Recipe, plan_casts

Evidence: TypeAlias = Literal["measured", "estimated", "compiled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What one cast or one matmul runs.

    Attributes:
      backend: its name, "xla" or that of a kernel.
      evidence: how the backend was chosen. "measured": by timings on the chip. "estimated": from
        figures of the chip (`fp8.plan.roofline`). "compiled": by neither.
      why: the reason, with estimated times, and what kernels that cannot do the case say.
      notes: the end of `why`, which other rows may have, too. The table says each of them once.

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
    """What the casts and matmuls of a layer run, each a `Choice`. `str()` is a table.

    `x`, `w` and `g` are the casts of these tensors.

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
        rows = {f"cast {name}": getattr(self, name) for name in ("x", "w", "g")}
        rows |= {name: getattr(self, name) for name in MATMULS}
        notes = list(dict.fromkeys(note for choice in rows.values() for note in choice.notes))
        lines = [self.title, f"{'part':6}  {'backend':9}  {'known by':9}  why"]
        for name, choice in rows.items():
            why = choice.why.removesuffix("".join(f"; {note}" for note in choice.notes))
            numbers = "".join(f" [{notes.index(note) + 1}]" for note in choice.notes)
            lines.append(f"{name:6}  {choice.backend:9}  {choice.evidence:9}  {why}{numbers}")
        return "\n".join([*lines, *(f"[{i}] {note}" for i, note in enumerate(notes, 1))])


@functools.lru_cache(maxsize=4096)  # a model has many layers and few shapes
def choices_of(kernels: Any, recipe: Recipe, shape: Shape, dtype: DType, mesh: Any) -> Choices:
    """What `fp8.Kernels` choose."""
    del mesh  # that of the context: a key of the cache, because it decides what kernels can do
    names: Backends = kernels.backends(recipe, shape)
    ran: dict[str, list[Dispatched]] = {}
    if kernels.timings is not None or set(names) != {XLA}:  # XLA can do every case
        ran = _trace(kernels, recipe, names, shape, dtype)
    chosen: dict[str, Choice] = {}
    routes: dict[Matmul, Route] = {}
    chip = chip_named(kernels.chip or "cpu")
    for name, size in matmul_sizes(shape).items():
        operands, found = getattr(recipe, name), ran.get(name, [])
        backend = found[-1].backend if found else "xla"
        routes[name] = route = route_of(sides_of(operands), backend, chip, size)
        seconds = matmul_seconds(sides_of(operands), kernels.chip, size)
        how = f", {route.value}"
        chosen[name] = _choice(kernels, kernels.matmuls, operands.in_fp8, found, seconds, how)
    for tensor in ("x", "w", "g"):
        is_cast = any(quantizer.value_format is not None for _, quantizer in recipe.uses(tensor))
        seconds = cast_seconds(recipe, tensor, kernels.chip, shape, routes)
        chosen[tensor] = _choice(kernels, kernels.casts, is_cast, ran.get(tensor, []), seconds)
    m, k, n = shape
    return Choices(title=f"{recipe.name}, [{m}, {k}] @ [{k}, {n}], {kernels!r}", **chosen)


def _trace(
    kernels: Any, recipe: Recipe, names: Backends, shape: Shape, dtype: DType
) -> dict[str, list[Dispatched]]:
    """What each cast and each matmul of a layer dispatches, on one device."""
    # `tests/plan/test_choices.py` compares it with what `fp8.dot` dispatches.
    ran: dict[str, list[Dispatched]] = {}
    by_xla = kernels.by_xla(names)

    def layer(**arrays: Array) -> None:
        copies: dict[tuple[Tensor, Matmul], Any] = {}
        for tensor in ("x", "w", "g"):
            backends = getattr(names, tensor)
            with recorded() as ran[tensor]:
                for planned in plan_casts(recipe, MATRICES, tensor, backends, by_xla=by_xla):
                    made = _quantized(planned, arrays[tensor])
                    for copy, readers in zip(made, planned.readers, strict=True):
                        copies |= {(tensor, name): copy for name in readers}
        for name in MATMULS:
            lhs, rhs = (copies[tensor, name] for tensor in OPERANDS[name])
            if not isinstance(lhs, QuantizedTensor) or not isinstance(rhs, QuantizedTensor):
                continue
            call = names.call(name, MATRICES, dtype, fast_accumulation=True)
            with recorded() as ran[name]:
                multiply(lhs, rhs, call, kernels.attempts(getattr(names, name), lhs, rhs, call))

    m, k, n = shape
    x, w, g = (jax.ShapeDtypeStruct(size, dtype) for size in ((m, k), (k, n), (m, n)))
    jax.eval_shape(layer, x=x, w=w, g=g)
    return ran


def _quantized(planned: PlannedCast, x: Array) -> tuple[Any, ...]:
    """The copies that a quantizer makes in a step after the first one."""
    if planned.cast is None:
        return (x,)
    stored = jnp.float32(1) if planned.quantizer.stateful else None
    key = jax.random.key(0) if planned.cast.rounding == "stochastic" else None
    inputs = ScaleInputs(functools.partial(amax, x), stored, True)
    return planned.quantizer.quantize(x, planned.cast, inputs, key=key)[0]


def _choice(
    kernels: Any, named: str | None, in_fp8: bool, ran: Sequence[Dispatched],
    seconds: Mapping[str, float], how: str = "",
) -> Choice:  # fmt: skip
    # A tensor with two quantizers has two casts. The one with more refusals is shown.
    used = max(ran, key=lambda each: len(each.refusals), default=Dispatched("xla", {}))
    refused = tuple(f"{name} cannot: {reason}" for name, reason in used.refusals.items())
    evidence: Evidence = "compiled"
    if not in_fp8:
        why = "in high precision"
    elif not isinstance(used.attempt, str):
        evidence, why = "measured", "the fastest of its timings"
    elif named is not None:
        why = "asked for by name"
    elif kernels.chip is None:
        why = "for every chip"
    elif used.backend not in seconds:
        why = "nothing is known to estimate from"
    else:
        evidence, why = "estimated", f"{1e6 * seconds[used.backend]:.1f} us{how}"
        others = [name for name in seconds if name not in (used.backend, *used.refusals)]
        why += "".join(f"; {name} {1e6 * seconds[name]:.1f} us" for name in others)
        refused = refused if len(seconds) > 1 else ("no other kernel is considered",)
    why = "; ".join((why, *refused))
    return Choice(backend=used.backend, evidence=evidence, why=why, notes=refused)
