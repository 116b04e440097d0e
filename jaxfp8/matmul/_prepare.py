"""`GroupedCall`: a `Call` for rows of several experts, and the sizes of their groups.

Letters: T rows, E groups; K N the axes of a matrix.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Array, DType
from jaxfp8.kernels.grouped_matmul._groups import group_ends
from jaxfp8.matmul._arrays import QuantizerArrays
from jaxfp8.matmul._call import AmaxAxes, Call, Places, amax_axes
from jaxfp8.matmul._options import Options, fp8_precision
from jaxfp8.matmul._stats import name_of_call
from jaxfp8.numerics._formats import check_out_dtype, product_dtype, sum_dtype
from jaxfp8.plan._backends import grouped_backends, tile_rows
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._place import Whole
from jaxfp8.state._gradient_channel import in_gradient_channel
from jaxfp8.state._identity import known_scales, match_state
from jaxfp8.state._state import MatmulState
from jaxfp8.state._value_and_grad import recipe_in_context

_GEOMETRY = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)  # of the matmul of one group


@dataclasses.dataclass(frozen=True)
class GroupedCall:
    """A grouped matmul without its operands and its rows."""

    call: Call
    quantizers: QuantizerArrays
    tile: int  # P, how many rows a tile of rows has

    @classmethod
    def of(
        cls, x: Array, w: Array, how: Options, *, recipe: Recipe,
        state: MatmulState | tuple[()] | None, tokens: int, precision: Any,
        preferred_element_type: DType | None,
    ) -> "GroupedCall":  # fmt: skip
        """The call for operands x [..., K] and w [E, K, N] of these types.

        x are rows, or the tokens that become rows. `tokens` says how many rows all groups have
        together, or about as many.
        """
        recipe, state = recipe_in_context(recipe, state)
        if how.state_channel == "gradient" and isinstance(state, MatmulState):
            state = in_gradient_channel(state, reduce_axes=how.reduce_axes)
        own = match_state(state, recipe, stacked=w.shape[0])
        kernels = check_kernels(how.kernels)
        probe = own.probe if own else None
        experts, k, n = w.shape
        if preferred_element_type is None:
            preferred_element_type = product_dtype(x.dtype, w.dtype)
        backends = grouped_backends(
            kernels.chip, kernels.casts, kernels.matmuls, recipe, (tokens, k, n), experts
        )
        call = Call(
            recipe=recipe,
            geometry=_GEOMETRY,
            out_dtype=check_out_dtype(preferred_element_type),
            precision=precision,
            fast_accumulation=fp8_precision(precision),
            out_sharding=None,
            collected=own is not None and not own.frozen,
            in_gradient_channel=probe is not None and probe.channel == "gradient",
            settled=own is not None and own.settled,
            amax_axes=_amax_axes(recipe, how.reduce_axes, probe.reduce_axes if probe else None),
            places=Places(Whole(), Whole(), Whole()),
            kernels=kernels,
            backends=backends,
            prologue=None,
            save_original=how.save_original or (),
            watched=name_of_call(how.name),
        )
        quantizers = QuantizerArrays(
            known=(probe.known if probe else known_scales(own)) if own else None,
            ledger=probe.ledger if probe else None,
            key=how.key if recipe.needs_key else None,
        )
        return cls(call, quantizers, tile_rows(tokens, experts, recipe.whole_tiles, backends))


def bias_of_rows(bias: Array, sizes: Array, y: Array) -> Array:
    """For each row of y [T, N] the bias of its group, of [E, N]; 0 for rows of the tail."""
    ends = group_ends(sizes, y.shape[0])
    group = jnp.sum(ends[None] <= jnp.arange(y.shape[0])[:, None], axis=1, dtype=jnp.int32)
    # Rows are taken in float32, so that the gradient is summed in float32.
    wide = bias.astype(sum_dtype(bias.dtype))
    return wide.at[group].get(mode="fill", fill_value=0.0).astype(y.dtype)


def _amax_axes(
    recipe: Recipe, given: tuple[str, ...] | None, probed: tuple[str, ...] | None
) -> AmaxAxes:
    """The axes over which amaxes are reduced. Axes that split experts are not among them."""
    axes = amax_axes(recipe, given, probed)
    if axes.named is None:
        axes = dataclasses.replace(axes, named=frozenset())
    return axes
