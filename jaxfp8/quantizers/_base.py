"""`AbstractQuantizer`: the policy that chooses the scale of an operand. Faults of its state."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._pytrees import register_node, register_value
from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array, Rounding
from jaxfp8.kernels.cast._api import KnownScale, cast_copies
from jaxfp8.numerics._exact import TINY
from jaxfp8.numerics._formats import E8M0, Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.numerics._scale import ScaleRule, inverse
from jaxfp8.prologues._prologue import Source

# Faults of rows of state that come from a file: values that no training run can produce.
#
# Between steps all numbers of a row are finite. Its scale is 0 (unset) or between 2^-126 and 2^126.


class Fault(NamedTuple):
    """A fault of some rows of a state."""

    leaf: str  # the name of the array with the fault
    rows: np.ndarray  # bool[...], which rows have it
    what: str  # what is wrong, for the message


def _faults_of_values(
    scale: np.ndarray, history: np.ndarray, nonfinite_steps: np.ndarray
) -> list[Fault]:
    """Values that no row may hold, whatever `update` computes."""
    in_range = (scale == 0) | ((scale >= TINY) & (scale <= 1 / TINY))  # False for NaN
    finite = np.all(np.isfinite(history), axis=-1)
    whole = nonfinite_steps == np.floor(nonfinite_steps)
    counts = whole & (nonfinite_steps >= 0) & (nonfinite_steps < np.inf)
    found = (
        Fault("scale", ~in_range, "it must be 0 (unset) or between 2^-126 and 2^126"),
        Fault("amax_history", ~finite, "every number in it must be finite"),
        Fault("nonfinite_steps", ~counts, "it must be a count of steps, 0 or more"),
    )
    return [fault for fault in found if fault.rows.any()]


# AbstractQuantizer: the policy that chooses the scale of one operand of a matmul.

_SCALE_DTYPES = ("float32", E8M0.dtype.name)

Operand: TypeAlias = QuantizedTensor | Array
"""What a matmul reads: a tensor in FP8, or an array that stays in high precision."""

Q = TypeVar("Q", bound="AbstractQuantizer")


@register_node
class RowState(NamedTuple):
    """The state of a stateful quantizer for one operand. Leading axes stack layers or experts.

    Attributes:
      scale: f32[...], the scale of the next step. 0 means unset: every amax until now was zero or
        not finite.
      amax_history: f32[..., H], the numbers that `update` remembers. H is `history_length`.
      nonfinite_steps: f32[...], the number of steps whose amax was inf or NaN.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.delayed(history_length=3).fprop.lhs.init().amax_history.shape
      (3,)
    """

    scale: Array
    amax_history: Array
    nonfinite_steps: Array


class ScaleInputs(NamedTuple):
    """The inputs from which a quantizer chooses the scale of a tensor x.

    Attributes:
      amax: `amax(granularity)` is the amax of the whole logical tensor x, on every mesh. Its shape
        is `granularity.scale_shape(x.shape)`. The granularity is that of the scale, or PerTensor().
        A call costs a read of x.
      stored: f32[], `RowState.scale` of a stateful quantizer; None for other quantizers.
      all_set: whether the stored scale is known to be set.
      multiplier: f32[], `stored_multiplier` of `stored`; None if it was not computed.

    Example:
      >>> import jax.numpy as jnp
      >>> ScaleInputs(amax=lambda granularity: jnp.float32(7.0), stored=None, all_set=False).stored
    """

    amax: Callable[[AbstractGranularity], Array]
    stored: Array | None
    all_set: bool
    multiplier: Array | None = None


class AbstractQuantizer(abc.ABC):
    """Chooses the scale of one operand and casts it. Subclasses are frozen, hashable dataclasses.

    A subclass defines `value_format`, and `granularity` if it has more than one scale. Most
    subclasses override one more method:

    - `scale_of_amax`, to compute the scale from an amax in another way.
    - `choose_scale`, to take the scale from another source.
    - `update`, to remember amaxes in another way. Such a quantizer has `stateful = True` and one
      scale.

    Example:
      >>> import dataclasses
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> @dataclasses.dataclass(frozen=True)
      ... class Roomy(fp8.quantizers.AbstractQuantizer):  # leaves room for values twice as large
      ...     value_format: fp8.quantizers.Format = fp8.E4M3
      ...     def scale_of_amax(self, amax):
      ...         return super().scale_of_amax(2 * amax)
      >>> q = fp8.recipes.Operands(lhs=Roomy(), rhs=Roomy())
      >>> recipe = fp8.Recipe(name="roomy", fprop=q, dgrad=q, wgrad=q)
      >>> fp8.dot(jnp.full((1, 2), 3.0), jnp.full((2, 1), 3.0), recipe=recipe)
      Array([[18.]], dtype=float32)
    """

    granularity: AbstractGranularity = PerTensor()
    """Which values share a scale."""
    stateful: ClassVar[bool] = False
    """Whether scales come from a row of quantizer state, which `update` computes after a step."""
    uses_amax: ClassVar[bool] = True
    """Whether `choose_scale` may ask for the amax of the tensor."""
    history_length: int = 1
    """H, the length of `RowState.amax_history` for a stateful quantizer."""
    rounding: Rounding = "nearest"
    """How the cast rounds: "nearest" (ties to even), or "stochastic", which needs a PRNG key."""

    @property
    @abc.abstractmethod
    def value_format(self) -> Format | None:
        """The format of the result; None if the operand stays in high precision."""

    @property
    def rule(self) -> ScaleRule:
        """How an amax becomes a scale. Matmuls of tiles read it: exact scales can be folded."""
        return ScaleRule()

    @property
    def has_exact_scales(self) -> bool:
        """Whether every scale is a power of two, so that bfloat16 holds it."""
        return self.rule.exact

    def scale_of_amax(self, amax: Array) -> KnownScale:
        """The multiplier and the scale for an amax f32[...]. By default `rule` computes both."""
        format = self.value_format
        assert format is not None
        return KnownScale(*self.rule.apply(amax, format, apart=True))

    def choose_scale(self, inputs: ScaleInputs, granularity: AbstractGranularity) -> KnownScale:
        """The scale for this step, of this granularity: from the state, or from the current amax.

        The current amax is used without state, and if the stored scale is unset. So the first step
        does not need a guess.
        """
        if inputs.stored is None:
            return self.scale_of_amax(inputs.amax(granularity))
        multiplier = inputs.multiplier
        if multiplier is None:
            multiplier = stored_multiplier(inputs.stored, inputs.stored > 0, inputs.all_set)
        stored = KnownScale(multiplier, inputs.stored)
        if inputs.all_set:
            return stored
        # Both scales are computed, because whether a scale is unset is known on the device only.
        is_set, current = multiplier > 0, self.scale_of_amax(inputs.amax(granularity))
        return KnownScale(*(jnp.where(is_set, *each) for each in zip(stored, current, strict=True)))

    def quantize(
        self, x: Source, cast: Cast, inputs: ScaleInputs, *, key: Array | None = None
    ) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
        """A copy of x [...] for each direction of the cast, and extra results of the cast kernel.

        Args:
          x: floating point, or the result of a prologue.
          cast: the copies to make. Their granularities are those of this quantizer for the axes of
            x.
          inputs: the amax of x and the stored scale.
          key: a jax PRNG key. It is passed if `rounding` is "stochastic".
        """
        # Copies with the same scale cells share one scale, so its amax is computed once.
        known = {
            each: self.choose_scale(inputs, each) for each in dict.fromkeys(cast.granularities)
        }
        for granularity, scale in known.items():
            shape = granularity.scale_shape(x.shape)
            leaves = scale if isinstance(scale, KnownScale) else ()
            types = [(jnp.shape(leaf), str(getattr(leaf, "dtype", ""))) for leaf in leaves]
            if types not in ([(shape, "float32"), (shape, name)] for name in _SCALE_DTYPES):
                raise ValueError(
                    f"{type(self).__name__} chose the scale {scale!r}. It must be a KnownScale of "
                    f"a float32 multiplier and a scale, both arrays of shape {list(shape)}."
                )
        return cast_copies(x, cast, tuple(known[each] for each in cast.granularities), key=key)

    def init(self) -> RowState:
        """The row of a stateful quantizer before the first step. By default its scale is unset."""
        zero = np.zeros((), np.float32)
        leaves: Any = zero, np.zeros(self.history_length, np.float32), zero
        return RowState(*leaves)

    def update(self, row: RowState, amax: Array) -> RowState:
        """The row after an optimizer step whose largest amax was `amax` [...].

        Stateful quantizers implement it. It is called once per step, for rows with any leading
        axes.

        Args:
          row: the row before the step.
          amax: f32[...], 0 if the step did not use the operand, inf if one of its values was not
            finite.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has state, but no update(row, amax). Define this method."
        )

    def faults(self, row: RowState) -> list[Fault]:
        """The faults of rows that were read from a file, on the host.

        A subclass can add values that its own `update` never writes.
        """
        return _faults_of_values(*map(np.asarray, row))


def stored_multiplier(scale: Array, is_set: Array, all_set: bool) -> Array:
    """The inverse of stored scales [...] float32, and a mark where they are unset."""
    # With the mark 0, `choose_scale` takes the current amax. NaN would not do: `jax_debug_nans`
    # would stop at the first step of each run. With `all_set` there is no current amax. A scale
    # that is unset after all then spoils the result.
    mark = np.float32(np.nan if all_set else 0.0)

    def selected(scale: Array, is_set: Array) -> Array:
        return jnp.where(is_set, inverse(jnp.where(is_set, scale, np.float32(1.0))), mark)

    def divided(scale: Array, is_set: Array) -> Array:
        # The inverse of inf is 0, the mark of an unset row. XLA:CPU does not fuse a division into
        # what reads it. A select after it would make each cast compute all of this again.
        return inverse(jnp.where(is_set, scale, np.float32(np.nan if all_set else np.inf)))

    return lax.platform_dependent(scale, is_set, cpu=divided, default=selected)


# Names of quantizers in files of `jax.export`.


def register_quantizer_serialization(kind: type[Q], *, serialized_name: str) -> type[Q]:
    """Name a quantizer class of yours in files of `jax.export`.

    States and weights of a recipe hold its quantizers. A program that takes or returns them is
    written with the name of the class and the fields of the quantizer. Call this in the program
    that writes the file, and in the one that reads it. No code of the class is in the file.

    Args:
      kind: a frozen dataclass on `AbstractQuantizer`. Its fields hold None, bool, int, float, str,
        dtypes, formats, granularities, or tuples of these.
      serialized_name: the name in files. It must never change, or older files cannot be read.

    Returns:
      The class, so that it is a decorator with `functools.partial`.

    Raises:
      TypeError: if `kind` is no such class, or the name no text.
      ValueError: if another class has the name.

    Example:
      >>> import dataclasses
      >>> import jaxfp8 as fp8
      >>> @dataclasses.dataclass(frozen=True)
      ... class Plain(fp8.quantizers.AbstractQuantizer):
      ...     value_format: fp8.quantizers.Format = fp8.E4M3
      >>> register_quantizer_serialization(Plain, serialized_name="my_project.Plain").__name__
      'Plain'
    """
    given: Any = kind
    is_quantizer = isinstance(given, type) and issubclass(given, AbstractQuantizer)
    if not is_quantizer or not dataclasses.is_dataclass(given):
        raise TypeError(
            f"kind={kind!r} must be a class on fp8.quantizers.AbstractQuantizer. Decorate it with "
            "@dataclasses.dataclass(frozen=True)."
        )
    if not isinstance(serialized_name, str) or not serialized_name:
        raise TypeError(
            f"serialized_name={serialized_name!r} must be a name, for instance "
            f"'my_project.{kind.__name__}'."
        )
    return register_value(kind, name=serialized_name)
