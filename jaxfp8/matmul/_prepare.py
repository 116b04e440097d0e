"""`prepare`: the `Call` of a matmul and the arrays of its quantizers, from what a user passes.

Letters: T rows, E groups; K N the axes of a matrix.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Array, DType
from jaxfp8.kernels.grouped_matmul._groups import group_ends
from jaxfp8.matmul._arrays import QuantizerArrays
from jaxfp8.matmul._call import WHOLE, Call, Places, amax_axes
from jaxfp8.matmul._options import Options, fp8_precision
from jaxfp8.matmul._stats import name_of_call
from jaxfp8.numerics._formats import check_out_dtype, product_dtype, sum_dtype
from jaxfp8.plan._backends import Backends, grouped_backends, tile_rows
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._gradient_channel import in_gradient_channel
from jaxfp8.state._identity import known_scales, match_state
from jaxfp8.state._state import MatmulState
from jaxfp8.state._value_and_grad import recipe_in_context

_OF_ONE_GROUP = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)


def prepare(
    how: Options, recipe: Recipe, state: MatmulState | tuple[()] | None,
    dtypes: tuple[DType, DType], geometry: TrainingGeometry, backends: Backends, *,
    places: Places = WHOLE, out_sharding: Any = None, groups: int | None = None,
) -> tuple[Call, QuantizerArrays]:  # fmt: skip
    """The call of operands with these dtypes. `groups` says how many a grouped matmul has."""
    if how.state_channel == "gradient" and isinstance(state, MatmulState):
        state = in_gradient_channel(state, reduce_axes=how.reduce_axes)
    own = match_state(state, recipe, stacked=groups)
    probe = None if own is None else own.probe
    out_dtype = how.preferred_element_type
    call = Call(
        recipe=recipe,
        geometry=geometry,
        out_dtype=check_out_dtype(product_dtype(*dtypes) if out_dtype is None else out_dtype),
        precision=how.precision,
        fast_accumulation=fp8_precision(how.precision),
        out_sharding=out_sharding,
        collected=own is not None and not own.frozen,
        in_gradient_channel=probe is not None and probe.channel == "gradient",
        settled=own is not None and own.settled,
        amax_axes=amax_axes(recipe, how.reduce_axes, probe.reduce_axes if probe else None),
        places=places,
        kernels=check_kernels(how.kernels),
        backends=backends,
        prologue=how.prologue,
        save_original=how.save_original or (),
        watched=name_of_call(how.name),
    )
    quantizers = QuantizerArrays(
        known=(probe.known if probe else known_scales(own)) if own else None,
        ledger=probe.ledger if probe else None,
        key=how.key if recipe.needs_key else None,
    )
    return call, quantizers


def prepare_groups(
    how: Options, recipe: Recipe, state: MatmulState | tuple[()] | None, x: Array, w: Array, *,
    tokens: int,
) -> tuple[Call, QuantizerArrays, int]:  # fmt: skip
    """The same for x [..., K] and w [E, K, N], and P, how many rows a tile of rows has.

    x are rows, or the tokens that become rows. `tokens` says how many rows all groups have
    together, or about as many.
    """
    recipe, state = recipe_in_context(recipe, state)
    kernels, (experts, k, n) = check_kernels(how.kernels), w.shape
    backends = grouped_backends(
        kernels.chip, kernels.casts, kernels.matmuls, recipe, (tokens, k, n), experts
    )
    call, quantizers = prepare(
        how, recipe, state, (x.dtype, w.dtype), _OF_ONE_GROUP, backends, groups=experts
    )
    if call.amax_axes.named is None:
        # Without names, an axis over which x and w both vary splits experts: see `Call.apart`.
        axes = dataclasses.replace(call.amax_axes, named=frozenset())
        call = dataclasses.replace(call, amax_axes=axes)
    return call, quantizers, tile_rows(tokens, experts, recipe.whole_tiles, backends)


def add_bias_of_rows(y: Array, bias: Array | None, sizes: Array) -> Array:
    """y [T, N] plus for each row the bias of its group, of [E, N]; 0 for rows of the tail."""
    if bias is None:
        return y
    ends = group_ends(sizes, y.shape[0])
    group = jnp.sum(ends[None] <= jnp.arange(y.shape[0])[:, None], axis=1, dtype=jnp.int32)
    # Rows are taken in float32, so that the gradient is summed in float32.
    wide = bias.astype(sum_dtype(bias.dtype))
    return y + wide.at[group].get(mode="fill", fill_value=0.0).astype(y.dtype)
