"""The modules that nnx layers call for their matmul. Each module holds the state of one matmul."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx

from jaxfp8._call import option_names
from jaxfp8._layer_arguments import documented
from jaxfp8._typing import Array, DotDimensionNumbers, DType, FP8StateError
from jaxfp8.matmul._given import needs_operands, refuse_class
from jaxfp8.matmul._options import LayerOptions, MatmulOptions, options_of, read_options
from jaxfp8.nnx._state import FP8State
from jaxfp8.nnx._value_and_grad import in_a_loss
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._einsum import einsum
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.recipes._presets import check_recipe, delayed
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._init import make_concrete, unset_state
from jaxfp8.state._state import MatmulState

LATER: Any = object()
"""A value for `rngs=`: a later call of `start_keys` takes the keys."""
_KEYS = "fp8"
"""Name of the stream of `nnx.Rngs` from which stochastic rounding takes its keys.

If this stream is missing, `nnx.Rngs` gives its default stream.
"""


def is_watched_by_qwix(module: Any) -> bool:
    """Whether qwix computes something for the matmul of a module: adapters, or its own FP8.

    qwix replaces `jax.lax.dot_general` and `jnp.einsum` while its model runs. It notes a path in
    each module of the model, by which it knows whose matmul it sees.
    """
    return hasattr(module, "qwix_path")


AFTER_QWIX = (
    "Apply qwix to the model without FP8, then convert: model = qwix.apply_lora_to_model(model, "
    "...); model, coverage = fp8.convert(model, recipe, inputs=...)."
)


class AbstractFP8Matmul(nnx.Module):
    """A module that an nnx layer calls for its matmul. It holds a recipe and the matmul's state.

    Give each layer an object of its own. Layers that share one object share one state. The amax of
    that state is the largest amax of these layers, or up to 1/8 larger.
    """

    def __new__(cls, *arguments: Any, **fields: Any) -> Any:
        refuse_class(cls, arguments, f"{cls.argument}={cls.__name__}(recipe)")
        return super().__new__(cls)

    argument: ClassVar[str]
    """The argument of flax's layers that takes an instance."""

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        rngs: Any = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.recipe = delayed() if recipe is None else recipe
        check_recipe(self.recipe)
        kept = read_options(f"fp8.nnx.{type(self).__name__}", LayerOptions, options)
        check_kernels(kept.kernels)
        for name in option_names(LayerOptions):  # `options_of` reads them
            setattr(self, name, getattr(kept, name))
        rows = self.recipe.rows
        self.state: Any = nnx.data(FP8State(unset_state(rows)) if rows else None)
        self.keys: Any = nnx.data(None)
        self.made_in_a_loss = in_a_loss()
        # `fp8.diagnostics.collect(model)` sets it, because a module of nnx does not know its path.
        self.name: str | None = None
        if rngs is not LATER:
            self.start_keys(rngs)

    def start_keys(self, rngs: Any) -> None:
        """Fork a stream of keys for this object, if its recipe needs keys. ValueError without one.

        `model.eval()` turns the stream off, as it does for `nnx.Dropout`.
        """
        if not self.recipe.needs_key:
            return
        name = type(self).__name__
        if not isinstance(rngs, nnx.Rngs):
            raise ValueError(
                f"rngs={rngs!r}, but recipe {self.recipe.name!r} rounds stochastically, which "
                f"needs a PRNG key at each step. Write {name}(recipe, rngs=nnx.Rngs(0, {_KEYS}=1))."
            )
        try:
            stream = rngs[_KEYS]
        except KeyError:
            raise ValueError(
                f"rngs={rngs!r} has no stream {_KEYS!r} and no default stream, but recipe "
                f"{self.recipe.name!r} rounds stochastically. Write "
                f"nnx.Rngs(..., {_KEYS}=1)."
            ) from None
        self.keys = nnx.data(stream.fork())
        self.deterministic = False

    def matmul_options(self, **given: Unpack[MatmulOptions]) -> MatmulOptions:
        """The options of the matmul at this call, with those that the call is given.

        TypeError if qwix was applied to a model with this object. It sees no matmul of a kernel
        here, so adapters would be missing.
        """
        if is_watched_by_qwix(self):
            raise TypeError(
                f"qwix was applied to a model with this {type(self).__name__}, whose matmul it "
                f"cannot see. So the layer would get no adapter. {AFTER_QWIX}"
            )
        options: MatmulOptions = {**options_of(self), **given}
        options["name"] = self.name
        if self.keys is not None and not self.deterministic:
            options["key"] = self.keys()
        return options

    @property
    def matmul_state(self) -> MatmulState | tuple[()]:
        """The quantizer state of this matmul. () for a recipe without state.

        FP8StateError if a layer made this object while a loss was running. The object ends with the
        call, so its state would be lost.
        """
        if self.state is None:
            return ()
        if self.made_in_a_loss:
            raise FP8StateError(
                f"a {type(self).__name__} with the state of recipe {self.recipe.name!r} was made "
                "while a loss was running. Its state would be lost after the call. flax makes a "
                "new object at every call for dot_general_cls= (qkv_dot_general_cls=, "
                "out_dot_general_cls=). Build the layer without this argument, then give it its "
                "own object: layer.dot_general = nnx.data(fp8.nnx.FP8DotGeneral(recipe)). For "
                "nnx.MultiHeadAttention do so for each of its layers query, key, value and out."
            )
        return make_concrete(self.state.get_value())


@documented
class FP8DotGeneral(AbstractFP8Matmul):
    """A module that is called like `jax.lax.dot_general`, for `dot_general=` of nnx layers.

    The arguments after `rngs` are options of `fp8.dot_general`.

    Args:
      recipe: which quantizer for which operand. Default: delayed scaling.
      rngs: `nnx.Rngs` for recipes that round stochastically. Its stream "fp8" gives the keys, or
        its default stream.

    Raises:
      TypeError: if `recipe` is not a Recipe, or if an option is unknown.
      ValueError: if `rngs` lacks a stream that the recipe needs.

    Example:
      >>> from flax import nnx
      >>> from jaxfp8.nnx import FP8DotGeneral
      >>> layer = nnx.Linear(8, 4, dot_general=FP8DotGeneral(), rngs=nnx.Rngs(0))
    """

    argument: ClassVar[str] = "dot_general"

    @needs_operands("dot_general=FP8DotGeneral(recipe)")
    def __call__(
        self,
        lhs: Array | tuple[Array, ...],
        rhs: Array,
        dimension_numbers: DotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: DType | None = None,
        out_sharding: Any = None,
        bias: Array | None = None,
        prologue: AbstractPrologue | None = None,
    ) -> Array:
        """Multiply lhs and rhs. For the arguments, see `fp8.dot_general`.

        Raises:
          FP8StateError: if `jnp.einsum` calls an object with state or keys.
        """
        if (self.state is not None or self.keys is not None) and _called_by_einsum():
            raise FP8StateError(
                "this FP8DotGeneral has quantizer state or PRNG keys, and it was passed as "
                "jnp.einsum(_dot_general=). There jax would keep the state of the first call. "
                "Write _dot_general=FP8EinsumOp(recipe).dot_general, or call the FP8EinsumOp "
                "itself."
            )
        options = self.matmul_options(out_sharding=out_sharding, prologue=prologue)
        return dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, recipe=self.recipe,
            state=self.matmul_state, bias=bias, **options,
        )  # fmt: skip


_EINSUM = inspect.unwrap(jnp.einsum).__globals__["__name__"]


def _called_by_einsum() -> bool:
    """Whether `jnp.einsum` called this object.

    `jnp.einsum` compiles once for each object. The state would be a constant of that program.
    """
    # Frame 0 is this function, 1 is `__call__`, 2 is `needs_operands`, 3 is the caller.
    return sys._getframe(3).f_globals.get("__name__") == _EINSUM


@documented
class FP8EinsumOp(AbstractFP8Matmul):
    """A module that is called like `jnp.einsum` of two operands, for `einsum_op=` of `nnx.Einsum`.

    The arguments after `rngs` are options of `fp8.dot_general`.

    Args:
      recipe: which quantizer for which operand. Default: delayed scaling.
      rngs: `nnx.Rngs` for recipes that round stochastically. Its stream "fp8" gives the keys, or
        its default stream.

    Raises:
      TypeError: if `recipe` is not a Recipe, or if an option is unknown.
      ValueError: if `rngs` lacks a stream that the recipe needs.

    Example:
      >>> from flax import nnx
      >>> from jaxfp8.nnx import FP8EinsumOp
      >>> layer = nnx.Einsum("bd,dk->bk", (8, 4), einsum_op=FP8EinsumOp(), rngs=nnx.Rngs(0))
    """

    argument: ClassVar[str] = "einsum_op"

    @needs_operands("einsum_op=FP8EinsumOp(recipe)", equation=True)
    def __call__(
        self,
        equation: str,
        lhs: Array | tuple[Array, ...],
        rhs: Array,
        precision: Any = None,
        preferred_element_type: DType | None = None,
        out_sharding: Any = None,
        prologue: AbstractPrologue | None = None,
    ) -> Array:
        """Compute the einsum. For the arguments, see `fp8.einsum`."""
        options = self.matmul_options(out_sharding=out_sharding, prologue=prologue)
        return einsum(
            equation, lhs, rhs, recipe=self.recipe, state=self.matmul_state, precision=precision,
            preferred_element_type=preferred_element_type, **options,
        )  # fmt: skip

    @property
    def dot_general(self) -> Callable[..., Array]:
        """The matmul alone, for `jnp.einsum(equation, lhs, rhs, _dot_general=op.dot_general)`.

        See `fp8.linen.FP8EinsumOp.dot_general`.
        """
        return functools.partial(
            dot_general, recipe=self.recipe, state=self.matmul_state, **self.matmul_options()
        )
