"""Call: everything about one call of a matmul except its arrays.

A `Call` is static in the custom gradient.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import OPERANDS, Geometry, TrainingGeometry
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType, Matmul, Tensor
from jaxfp8.kernels.cast._api import WRITE_TRANSPOSED
from jaxfp8.kernels.grouped_matmul import _api as grouped_matmul
from jaxfp8.kernels.grouped_matmul._api import groups_product, rows_product
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul._api import multiply
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._formats import sum_dtype
from jaxfp8.ops._amax_axes import AmaxAxes
from jaxfp8.plan._backends import Backends
from jaxfp8.plan._kernels import Kernels
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.quantizers._base import Operand
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._place import Place


class Places(NamedTuple):
    """Where each tensor is in the mesh."""

    x: Place
    w: Place
    g: Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Everything about a call except its arrays. Hashable."""

    recipe: Recipe
    geometry: TrainingGeometry
    out_dtype: DType
    precision: Any
    fast_accumulation: bool  # of fprop only
    out_sharding: Any
    collected: bool  # amaxes go to the state's probe
    in_gradient_channel: bool  # the cotangent of the state is the next state
    settled: bool  # no stored scale is unset
    amax_axes: AmaxAxes
    places: Places
    kernels: Kernels
    backends: Backends  # of each cast and matmul, as `kernels` chooses them
    prologue: AbstractPrologue | None  # makes x from other arrays, inside the cast kernel
    save_original: tuple[Tensor, ...]  # the tensors that are residuals in high precision
    watched: str | None  # the name under which casts report statistics; None if they do not

    @property
    def by_xla(self) -> frozenset[Matmul]:
        """The matmuls that XLA computes. None is certain if timings choose."""
        if self.kernels.timings is not None:
            return frozenset()
        return frozenset(name for name in OPERANDS if getattr(self.backends, name)[0] == "xla")

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
        return MatmulCall(
            geometry=getattr(self.geometry, matmul),
            out_dtype=jnp.dtype(out_dtype),
            fast_accumulation=self.fast_accumulation and matmul == "fprop",
            out_sharding=out_sharding,
            written_transposed=self._written_transposed(matmul),
        )

    def _wide(self, lhs: Array, rhs: Array) -> tuple[Array, Array]:
        """Both operands in one dtype.

        g has the dtype of y. `preferred_element_type` can make it differ from that of x. With
        strict promotion JAX would raise an error here, where no caller can write a cast.
        """
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        return lhs.astype(dtype), rhs.astype(dtype)

    def _written_transposed(self, matmul: Matmul) -> tuple[bool, bool]:
        """See `MatmulCall`."""
        lhs, rhs = (getattr(self.backends, tensor)[0] for tensor in OPERANDS[matmul])
        return lhs in WRITE_TRANSPOSED, rhs in WRITE_TRANSPOSED


def _dequantized_stack(operand: Operand) -> Array:
    """A stack of arrays in high precision. A granularity is that of one of them."""
    if not isinstance(operand, QuantizedTensor):
        return operand
    return jax.vmap(lambda one: one.dequantize())(operand)
