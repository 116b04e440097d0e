"""`Options` of a call, and the checks of its arguments.

A new option is a new field of `Options`, and of the `TypedDict` of the functions that take it. An
option in `LayerOptions` is also a field of `linen.MatmulModule`.

Of layers there are also `LayerInput`, the left operand, and `KeepsFP8`, which promotes dtypes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._call import check_options, option_names
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, ArrayLike, DType, Tensor
from jaxfp8.numerics._formats import check_float_dtype
from jaxfp8.plan._kernels import Kernels
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight

# The options of a matmul: its arguments besides operands, recipe and state.

# How quantizer state leaves the backward pass, if `fp8.value_and_grad` does not collect it.
StateChannel: TypeAlias = Literal["gradient"]


def check_state_channel(channel: object) -> None:
    """Raise ValueError unless the argument is a channel or None."""
    if channel is not None and channel != "gradient":
        raise ValueError(
            f'state_channel={channel!r} must be None, for fp8.value_and_grad, or "gradient", for '
            "jax.value_and_grad over all variables and a loop that overwrites states with their "
            "gradients."
        )


def check_save_original(tensors: object) -> None:
    """Raise ValueError unless the argument is None or a tuple of "x" and "w"."""
    if tensors is not None and not (isinstance(tensors, tuple) and set(tensors) <= {"x", "w"}):
        raise ValueError(
            f'save_original={tensors!r} must be a tuple of the names "x" and "w": the operands '
            'that the backward pass casts again from high precision, for instance ("x",).'
        )


class UnshardedOptions(TypedDict, total=False):
    """The options of a layer whose matmul takes no shards; see `fp8.ragged_dot`."""

    reduce_axes: tuple[str, ...] | None
    kernels: Kernels | None
    state_channel: StateChannel | None
    save_original: tuple[Tensor, ...] | None


class LayerOptions(UnshardedOptions, total=False):
    """The options that a layer has as attributes, for its matmul; see `fp8.dot_general`."""

    x_shard: Shard | None
    w_shard: Shard | None
    y_shard: Shard | None


class MatmulOptions(LayerOptions, total=False):
    """The options of every matmul; see `fp8.dot_general`."""

    out_sharding: Any
    key: Array | None
    prologue: AbstractPrologue | None
    name: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The options of one call, with their defaults."""

    precision: Any = None
    preferred_element_type: DType | None = None
    reduce_axes: tuple[str, ...] | None = None
    x_shard: Shard | None = None
    w_shard: Shard | None = None
    y_shard: Shard | None = None
    kernels: Kernels | None = None
    state_channel: StateChannel | None = None
    save_original: tuple[Tensor, ...] | None = None
    out_sharding: Any = None
    key: Array | None = None
    prologue: AbstractPrologue | None = None
    bias: Array | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        check_state_channel(self.state_channel)
        check_save_original(self.save_original)
        if self.key is not None:
            _check_key(self.key)


def read_options(
    function: str,
    known: type,
    options: Any,
    precision: Any = None,
    preferred_element_type: DType | None = None,
) -> Options:
    """The options of a call, of which `known`, a TypedDict, lists the names."""
    check_options(function, known, options)
    return Options(precision=precision, preferred_element_type=preferred_element_type, **options)


def options_of(layer: Any, known: type = LayerOptions) -> LayerOptions:
    """The options that a layer has as attributes. Attributes have the names of the options."""
    given: Any = {name: getattr(layer, name) for name in option_names(known)}
    return LayerOptions(**given)


# Checks of what users pass to a matmul.


def check_operands(
    lhs: ArrayLike, rhs: Any, recipe: Recipe, prologue: AbstractPrologue | None = None
) -> tuple[tuple[Array, ...], Any]:
    """lhs as a tuple, of one array or those of a prologue, and rhs, in dtypes that FP8 accepts."""
    check_recipe(recipe)
    if is_weight(rhs):
        if recipe.is_identity:
            raise TypeError(
                f"rhs is {rhs}, but recipe {recipe.name!r} multiplies in high precision. Leave "
                "this weight out of quantize_params."
            )
        return check_arrays("lhs", lhs, prologue), rhs
    if recipe.is_identity and prologue is None:
        # No operand is quantized, so every dtype that lax.dot_general accepts is allowed.
        return (_one_array("lhs", lhs),), _one_array("rhs", rhs)
    return check_arrays("lhs", lhs, prologue), check_float("rhs", rhs)


def check_arrays(
    name: str, given: ArrayLike, prologue: AbstractPrologue | None
) -> tuple[Array, ...]:
    """The arrays of a prologue, or one array, in dtypes that can be quantized."""
    if prologue is None:
        return (check_float(name, given),)
    check_prologue(name, prologue)
    return tuple(
        check_float(f"{name}, {each}", array)
        for each, array in zip(prologue.names, _check_tuple(name, given, prologue), strict=True)
    )


def check_prologue(name: str, prologue: object) -> None:
    """Raise TypeError unless `prologue` is a prologue of the argument `name`, or None."""
    if prologue is None or isinstance(prologue, AbstractPrologue):
        return
    raise TypeError(
        f"prologue={prologue!r} is no prologue. Use fp8.prologues.SwiGLU() or "
        f"fp8.prologues.RMSNorm(), or apply your function to {name}."
    )


def _check_tuple(name: str, given: Any, prologue: AbstractPrologue) -> tuple[Any, ...]:
    if not isinstance(given, tuple | list) or len(given) != len(prologue.names):
        names = ", ".join(prologue.names)
        raise TypeError(
            f"{name} is {_named(given)}, but prologue={prologue!r} takes {len(prologue.names)} "
            f"arrays. Pass the tuple ({names}), or leave prologue= out."
        )
    return tuple(given)


def check_float(name: str, x: ArrayLike) -> Array:
    """x as an array of a dtype that can be quantized."""
    if not isinstance(x, jax.Array):
        x = _one_array(name, x)
    check_float_dtype(name, x)
    return x


def check_high_precision(function: str, **matrices: object) -> None:
    """Raise TypeError if matrices of groups are FP8 weights of `fp8.quantize_params`."""
    for name, w in matrices.items():
        if is_weight(w):
            raise TypeError(
                f"{name} is {w}. {function} takes matrices in high precision. Leave them out of "
                "fp8.quantize_params, by rules=."
            )


def _one_array(name: str, x: ArrayLike) -> Array:
    # As `as_array`, but a tuple of arrays raises an error that names `prologue=`.
    if isinstance(x, tuple) and any(
        isinstance(each, jax.Array) or getattr(each, "shape", ()) for each in x
    ):
        raise TypeError(
            f"{name} is {_named(x)}, but one array is needed. Pass one array, or name the "
            "prologue= that makes one array of them."
        )
    return as_array(name, x)


def as_array(name: str, x: ArrayLike) -> Array:
    """x as an array. Raises TypeError for what is none."""
    if isinstance(x, jax.Array):
        return x
    if (cure := _no_array(name, x)) is not None:
        raise TypeError(f"{name} is {_named(x)}, but one array is needed; {cure}")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{name} is {_named(x)}, but one array is needed; pass an array of numbers. ({error})"
        ) from None


def _no_array(name: str, x: object) -> str | None:
    """What to write instead of an argument that is no array. None if jax may accept it."""
    if x is None:
        return "pass an array. If it is a parameter, the layer or the checkpoint may lack it."
    if isinstance(x, QuantizedTensor):
        return f"pass the high-precision array, or {name}.dequantize()."
    if is_weight(x):
        return "a weight in FP8 is a right operand, and only of matmuls with its recipe."
    if isinstance(x, jax.ShapeDtypeStruct):
        cure = "Call the function under jax.eval_shape, or pass an array."
        return f"it has a shape but no values. {cure}"
    if hasattr(x, "unbox"):
        return "take the array out of its box: flax.linen.meta.unbox(variables)."
    if isinstance(x, dict):
        return f"pass one of its values. Its keys are {list(x)[:6]}."
    if callable(x) and not hasattr(x, "__jax_array__"):
        return "pass what it returns."
    return None


def _named(x: object) -> str:
    if x is None:
        return "None"
    if isinstance(x, jax.Array):
        return f"an array {x.dtype.name}{list(x.shape)}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, jax.ShapeDtypeStruct | str | type):
        return repr(x)
    return f"of type {type(x).__name__}"


def fp8_precision(precision: Any) -> bool:
    """Whether `precision` allows fast accumulation in fprop."""
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    try:
        canonical = {lax.Precision.DEFAULT if p is None else lax.Precision(p) for p in pair}
    except ValueError:
        canonical = set()
    if len(pair) != 2 or len(canonical) != 1:
        raise ValueError(
            f"precision={precision!r} is not a precision of an FP8 matmul. Use None or 'default' "
            "for fast accumulation, 'high' or 'highest' for full accumulation."
        )
    return canonical == {lax.Precision.DEFAULT}


def _check_key(key: object) -> None:
    """Raise TypeError unless `key` is one PRNG key, typed or as uint32."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if (is_typed and shape == ()) or (dtype == "uint32" and shape is not None and len(shape) == 1):
        return
    given = repr(key) if dtype is None else f"an array of {dtype}{list(shape or ())}"
    raise TypeError(
        f"key={given} is not one PRNG key. Pass jax.random.key(0), and a new key at each step. Use "
        "split keys only under jax.vmap, one for each example."
    )


# flax's promotion of dtypes, for layers whose kernel may be a weight in FP8.


@dataclasses.dataclass(frozen=True)
class KeepsFP8:
    """A `promote_dtype` that promotes arrays as another one does, and leaves FP8 weights alone."""

    promote: Callable[..., Any]

    @classmethod
    def of(cls, promote: Callable[..., Any]) -> "KeepsFP8":
        return promote if isinstance(promote, cls) else cls(promote)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # linen passes arrays, nnx passes one tuple of arrays.
        in_tuple = len(arguments) == 1 and isinstance(arguments[0], tuple)
        arrays = arguments[0] if in_tuple else arguments
        if not any(map(is_weight, arrays)):
            return self.promote(*arguments, **options)
        like = tuple(jnp.zeros((), each.dtype) if is_weight(each) else each for each in arrays)
        promoted = self.promote(like, **options) if in_tuple else self.promote(*like, **options)
        return tuple(
            _checked(each, new.dtype) if is_weight(each) else new
            for each, new in zip(arrays, promoted, strict=True)
        )


def _checked(weight: QuantizedWeight, dtype: Any) -> QuantizedWeight:
    if weight.dtype != dtype:
        raise TypeError(
            f"a layer computes in {jnp.dtype(dtype).name}, but its kernel is {weight}. The layer "
            f"would round a kernel to {jnp.dtype(dtype).name} before the cast to FP8. Do the same: "
            f"fp8.quantize_params(..., dtype=jnp.{jnp.dtype(dtype).name})."
        )
    return weight


# The input of a layer: one array, or the arrays of a prologue.


@dataclasses.dataclass(frozen=True)
class LayerInput:
    """The left operand of a layer's matmul."""

    arrays: tuple[Array, ...]  # one array, or those of the prologue
    prologue: AbstractPrologue | None  # computes the left operand from the arrays

    @classmethod
    def read(cls, inputs: Any, prologue: AbstractPrologue | None) -> Self:
        """Check the argument `inputs` of a layer."""
        if prologue is None:
            return cls((_one_array("inputs", inputs),), None)

        def one(name: str, given: ArrayLike) -> Array:
            # Layers promote activations, and not the parameters of a prologue.
            check = check_float if name in prologue.parameters else as_array
            return check(f"inputs, {name}", given)

        given = _check_tuple("inputs", inputs, prologue)
        return cls(tuple(map(one, prologue.names, given)), prologue)

    def promoted(
        self, promote: Callable[..., Sequence[Any]], kernel: Array, bias: Array | None
    ) -> tuple[Self, Array, Array | None]:
        """The input, the kernel and the bias in one dtype, by flax's `promote_dtype`."""
        names = (None,) if self.prologue is None else self.prologue.names
        kept = () if self.prologue is None else self.prologue.parameters
        pairs = list(zip(names, self.arrays, strict=True))
        promote = KeepsFP8.of(promote)
        *activations, w, b = promote(*(x for name, x in pairs if name not in kept), kernel, bias)
        rest = iter(activations)
        arrays = tuple(x if name in kept else next(rest) for name, x in pairs)
        return dataclasses.replace(self, arrays=arrays), w, b

    @property
    def like(self) -> Array:
        """An array with the shape and dtype of the left operand."""
        return self.arrays[0]

    @property
    def lhs(self) -> Array | tuple[Array, ...]:
        """The left operand, for a function that takes `prologue=`."""
        return self.arrays[0] if self.prologue is None else self.arrays

    @property
    def value(self) -> Array:
        """The left operand itself, computed here if there is a prologue."""
        return self.arrays[0] if self.prologue is None else self.prologue(*self.arrays)
