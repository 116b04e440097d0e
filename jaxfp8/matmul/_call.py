"""`Call`: all that is static about a matmul and its gradient, and where its amaxes are combined.

A `Call` is static in the custom gradient.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import Geometry, TrainingGeometry
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType, FP8StateError, Matmul, Tensor
from jaxfp8.kernels.grouped_matmul import _api as grouped_matmul
from jaxfp8.kernels.grouped_matmul._api import groups_product, rows_product
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul._api import multiply
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.matmul._stats import SumStats, Watched, sum_stats
from jaxfp8.numerics._formats import sum_dtype
from jaxfp8.plan._backends import Backends
from jaxfp8.plan._kernels import Kernels
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.quantizers._base import Operand
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import check_axes, manual_axes, types_show_varying
from jaxfp8.sharding._place import Place

# The mesh axes over which the amaxes of one matmul are reduced inside `jax.shard_map`.
#
# With `check_vma=True`, JAX's types say over which manual axes a tensor varies. If types are off or
# cannot decide, the caller names the axes with `reduce_axes=`.


@dataclasses.dataclass(frozen=True)
class AmaxAxes:
    """What is known about the axes without the tensors of the call. Hashable."""

    named: frozenset[str] | None  # by the caller, of the manual ones; None without `reduce_axes=`
    typed: bool  # whether types say over which manual axes a tensor varies
    manual: bool  # inside `jax.shard_map`; outside of it arrays and their amaxes are global

    @property
    def untyped(self) -> frozenset[str]:
        """The axes over which every per-tensor amax is reduced. Empty if types are on."""
        return frozenset() if self.typed else self.named or frozenset()


_GLOBAL = AmaxAxes(None, typed=True, manual=False)


class Varying(NamedTuple):
    """The manual mesh axes over which the operands vary, by their types."""

    x: frozenset[str] = frozenset()
    w: frozenset[str] = frozenset()
    g: frozenset[str] = frozenset()  # empty in the forward pass


_NOWHERE = Varying()


def amax_axes(
    recipe: Recipe, given: tuple[str, ...] | None, probed: tuple[str, ...] | None
) -> AmaxAxes:
    """The axes of a call. `probed` is `reduce_axes=` of `fp8.value_and_grad`."""
    if given is not None and not isinstance(given, tuple | list | frozenset | set):
        raise TypeError(
            f"reduce_axes={given!r} must be a tuple of mesh axis names; write ({given!r},)."
        )
    named = given if given is not None else probed
    if named is not None:
        check_axes(named)
    if not manual_axes():
        # flax also initializes layers for shard_map outside of it. Their named axes are ignored
        # here, so that `init` does not raise an error.
        return _GLOBAL
    typed = types_show_varying()
    if named is None:
        if not typed and recipe.combines_amaxes:  # an amax of one shard would be wrong
            raise _unknown(recipe)
        return AmaxAxes(None, typed, manual=True)
    manual = frozenset(named) & set(manual_axes())
    if manual and recipe.tensors_in_rows and not typed:
        raise _ignored(recipe, tuple(named))
    return AmaxAxes(manual, typed, manual=True)


def _unknown(recipe: Recipe) -> FP8StateError:
    where = (
        "fp8.value_and_grad, this call or this layer" if recipe.rows else "this call or this layer"
    )
    cure = f"Name the axes that an amax is reduced over with reduce_axes= of {where}."
    if recipe.tensors_in_rows:  # per-row amaxes do not accept reduce_axes=
        cure = (
            f"Recipe {recipe.name!r} has amaxes of tensors and of rows, which needs check_vma=True."
        )
    return FP8StateError(
        f"inside shard_map(check_vma=False) over {manual_axes()} types do not say which mesh axes "
        f"a tensor is split over. {cure}"
    )


def _ignored(recipe: Recipe, named: tuple[str, ...]) -> FP8StateError:
    cure = " If no mesh axis splits what a matmul contracts, leave reduce_axes= out."
    return FP8StateError(
        f"reduce_axes={named} is given to recipe {recipe.name!r}, which has a scale for each row "
        f"of {', '.join(recipe.tensors_in_rows)}, inside shard_map(check_vma=False) over "
        f"{manual_axes()}. Only types say which matmul contracts a row across devices. Use "
        f"check_vma=True.{'' if recipe.combines_amaxes else cure}"
    )


# Call: everything about one call of a matmul except its arrays.


class Places(NamedTuple):
    """Where each tensor is in the mesh."""

    x: Place = Place()
    w: Place = Place()
    g: Place = Place()


WHOLE = Places()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Everything about a call except its arrays. Hashable."""

    recipe: Recipe
    geometry: TrainingGeometry
    out_dtype: DType
    precision: Any = None
    fast_accumulation: bool = False  # of fprop only
    out_sharding: Any = None
    differentiated: bool = False  # in the passes of a gradient
    collected: bool  # amaxes go to the state's probe
    in_gradient_channel: bool = False  # the cotangent of the state is the next state
    settled: bool  # no stored scale is unset
    amax_axes: AmaxAxes
    places: Places
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    # Of each cast and matmul, as `kernels` chooses them.
    backends: Backends = dataclasses.field(default_factory=Backends)
    prologue: AbstractPrologue | None = None  # makes x from other arrays, inside the cast kernel
    save_original: tuple[Tensor, ...] = ()  # the tensors that are residuals in high precision
    watched: Watched | None = None  # what it reports, if it does
    varying: Varying = _NOWHERE  # in this pass, without the axes that operands are gathered over

    def contracted(self, matmul: Matmul, tensor: Tensor) -> frozenset[str]:
        """The axes over which devices that contract one row must use one scale for it."""
        x, w, _ = self.varying
        if matmul == "fprop":
            # Types cannot decide here: an axis over which x and w both vary may split the
            # contraction, pipeline stages or experts. The caller names it, or `y_shard=` sums it.
            named = self.amax_axes.named
            if named is None or self.geometry.fprop.lhs.batch:
                named = frozenset()
            return x & w & (named | self.places.g.manual_axes)
        # If an operand varies over an axis and the result does not, the axis is contracted.
        mine: frozenset[str] = getattr(self.varying, tensor)
        return (mine | x) - w if matmul == "wgrad" else (mine | w) - x

    @property
    def apart(self) -> frozenset[str]:
        """The axes of pipeline stages or experts, over which each device has its own amaxes."""
        named, (x, w, _) = self.amax_axes.named, self.varying
        # x and w both vary over such an axis, and the caller did not name it.
        return frozenset() if named is None else (x & w) - named - self.places.g.manual_axes

    def multiply(
        self, matmul: Matmul, lhs: Operand, rhs: Operand, out_dtype: DType, out_sharding: Any
    ) -> Array:
        """One of the three matmuls. It is in FP8 if both operands are in FP8."""
        geometry: Geometry = getattr(self.geometry, matmul)
        # `assert_fp8_gemms` reads the names of these scopes in compiled programs.
        if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
            call = self._matmul_call(matmul, out_dtype, out_sharding)
            with jax.named_scope(f"jaxfp8.{matmul}"):
                names: tuple[str, ...] = getattr(self.backends, matmul)
                return multiply(lhs, rhs, call, self.kernels.attempts(names, lhs, rhs, call))
        with jax.named_scope(f"jaxfp8.{matmul}.high_precision"):
            lhs, rhs = self._wide(
                *(t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (lhs, rhs))
            )
            return lax.dot_general(
                lhs, rhs, geometry.dimension_numbers, self.precision, out_dtype,
                out_sharding=out_sharding,
            )  # fmt: skip

    def sum_stats(self, matmul: Matmul, lhs: Operand, rhs: Operand) -> tuple[SumStats, ...]:
        """What tensor cores lose of the sums of `multiply`; () if that is not watched."""
        if self.watched is None or not self.watched.sums:
            return ()
        if not (isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor)):
            return ()
        if not (lhs.values.size and rhs.values.size):
            return ()
        return (sum_stats(matmul, lhs, rhs, self._matmul_call(matmul, self.out_dtype, None)),)

    def multiply_groups(
        self, matmul: Matmul, lhs: Operand, rhs: Operand, groups: Groups, out_dtype: DType
    ) -> Array:
        """One of the three matmuls of all groups. The operands are stacks."""
        geometry: Geometry = getattr(self.geometry, matmul)
        call = self._matmul_call(matmul, out_dtype, None)
        if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
            with jax.named_scope(f"jaxfp8.{matmul}"):
                return grouped_matmul.multiply(
                    lhs, rhs, groups, call, getattr(self.backends, matmul)
                )

        def product(lhs: Array, rhs: Array) -> Array:
            return lax.dot_general(
                lhs, rhs, geometry.dimension_numbers, self.precision, sum_dtype(out_dtype)
            )

        with jax.named_scope(f"jaxfp8.{matmul}.high_precision"):
            lhs, rhs = self._wide(*map(_dequantized_stack, (lhs, rhs)))
            rows, columns = geometry.out_shape(lhs.shape[1:], rhs.shape[1:])
            if call.sums_rows:
                return groups_product(product, lhs, rhs, groups, (rows, columns), out_dtype)
            return rows_product(product, lhs, rhs, groups, columns, out_dtype)

    def _matmul_call(self, matmul: Matmul, out_dtype: DType, out_sharding: Any) -> MatmulCall:
        return self.backends.call(
            matmul, self.geometry, out_dtype, fast_accumulation=self.fast_accumulation,
            out_sharding=out_sharding,
        )  # fmt: skip

    def _wide(self, lhs: Array, rhs: Array) -> tuple[Array, Array]:
        # g has the dtype of y, which `preferred_element_type` can make differ from that of x. With
        # strict promotion JAX would raise an error here, where no caller can write a cast.
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        return lhs.astype(dtype), rhs.astype(dtype)


def _dequantized_stack(operand: Operand) -> Array:
    """A stack of arrays in high precision. A granularity is that of one of them."""
    if not isinstance(operand, QuantizedTensor):
        return operand
    return jax.vmap(lambda one: one.dequantize())(operand)
