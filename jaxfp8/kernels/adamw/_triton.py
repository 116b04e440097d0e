"""AdamW with moments in groups of 128 values, in Triton, called through jax-triton.

A kernel reads gradient, weight and moments once. It writes weight and moments once, in place. XLA
reads the moments twice: for the largest magnitudes of the groups, and for the codes.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import compute_capability_of
from jaxfp8.kernels._on_mesh import mesh_of, on_mesh
from jaxfp8.kernels._triton_call import triton_call
from jaxfp8.kernels.adamw import _triton_kernels as kernels
from jaxfp8.kernels.adamw._step import GROUP, AdamWStep
from jaxfp8.numerics._per_block import merge_axes, split_axis

BLOCK, WARPS = 32, 8  # groups and warps of a program: 16 values a thread
_FP8_SINCE = 89  # compute capability of the first GPUs with FP8 conversions, Ada (PTX ISA, cvt)


class _Weight(NamedTuple):
    """A weight and all that belongs to it. An update replaces all fields but the gradient."""

    # A moment is a NamedTuple. Its first field holds values [..., C]. The others hold one float32
    # for each group, [..., C / 128]. The last axis of a weight has whole groups.
    first: Any  # the first moment, as `Int8` or `ExpandedFP8` store it
    second: Any  # the second moment
    weight: Array  # [..., C] float32, or bfloat16 if it has a remainder
    low: Array | None  # [..., C] uint8 or uint16, the remainder of the master weight
    gradient: Array  # [..., C], of at most 4 bytes a value


def update(
    weights: Sequence[Any],
    scalars: tuple[Array, ...],
    elsewhere: Any,
    *,
    steps: Sequence[AdamWStep],
) -> list[tuple[Any, ...]]:
    """New moments, weight and remainder of each weight, given as the fields of a `_Weight`.

    The scalars, [] each, are the learning rate, the bias corrections `1 / (1 - b**step)`, the
    threshold of the first value of a group, and whether to skip the step. `elsewhere` is what other
    platforms return.

    Raises NotImplementedError on a GPU without FP8, if moments are in FP8. Also for the meshes that
    `on_mesh` refuses.
    """
    del elsewhere
    return [_one(_Weight(*each), scalars, step) for each, step in zip(weights, steps, strict=True)]


# Outside `jax.jit` this makes one program. Op by op, jax 0.12 cannot run the calls of jax-triton
# 0.4.1.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def _one(of: _Weight, scalars: tuple[Array, ...], step: AdamWStep) -> tuple[Any, ...]:
    replaced, structure = jax.tree.flatten(of[:-1])
    capability = compute_capability_of(mesh_of(*replaced))
    if len(of.first) == 3 and (capability or _FP8_SINCE) < _FP8_SINCE:
        raise NotImplementedError(
            f"The GPU has compute capability {capability}. FP8 needs {_FP8_SINCE} or more. Use "
            "moments=Int8()."
        )
    axis = of.weight.ndim - 1
    has_values = [each.shape == of.weight.shape for each in replaced]

    def in_groups(x: Array) -> Array:
        """[..., groups, 128], or [..., groups, 1] of what each group has."""
        if x.shape != of.weight.shape:
            return lax.expand_dims(x, (axis + 1,))
        return split_axis(x, axis, x.shape[axis] // GROUP)

    kernel = functools.partial(_launch, step, capability, structure)
    results = on_mesh(
        kernel, (1, GROUP), tuple((1, 1 if values else GROUP) for values in has_values)
    )(
        *map(in_groups, (*replaced, of.gradient)),
        *(jnp.reshape(each.astype(jnp.float32), (1,) * (axis + 2)) for each in scalars),
    )
    return jax.tree.unflatten(
        structure,
        [
            merge_axes(x, (*[1] * axis, 2)) if values else lax.squeeze(x, (axis + 1,))
            for x, values in zip(results, has_values, strict=True)
        ],
    )


def _launch(
    step: AdamWStep, capability: int | None, structure: Any, *operands: Array
) -> tuple[Array, ...]:
    """The kernel on arrays [..., groups, 128 or 1]."""
    # Under `jax.vmap` the first array has the mapped axes, and others may have size 1 there.
    lead = operands[0].shape[:-2]
    *replaced, gradient = (
        jnp.broadcast_to(each, (*lead, *each.shape[-2:])) for each in operands[:-5]
    )
    rate, *others = _of_models(operands[-5:], gradient.shape)
    first, second, weight, low = jax.tree.unflatten(structure, replaced)
    # In the kernel's order. `rate` stands for what there is not. The kernel does not read it.
    powers = [moment[2] if len(moment) == 3 else rate for moment in (first, second)]
    arrays = [*first[:2], *second[:2], weight, rate if low is None else low, *powers]
    overwrites = [i for i, each in enumerate(arrays) if each is not rate]
    groups = weight.size // GROUP
    results = triton_call(
        *arrays,
        gradient,
        rate,
        *others,
        kernel=kernels.adamw,
        results=[jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in overwrites],
        grid=-(-groups // BLOCK),
        warps=WARPS,
        compute_capability=capability,
        overwrites=overwrites,
        GROUPS=groups,
        MODELS=rate.size,
        BLOCK=BLOCK,
        EXPANDED=len(first) == 3,
        LOW_BITS=0 if low is None else 8 * low.dtype.itemsize,
        B1=step.b1,
        B2=step.b2,
        EPS=step.eps,
        EPS_ROOT=step.eps_root,
        DECAY=step.weight_decay,
    )
    for i, result in zip(overwrites, results, strict=True):
        arrays[i] = result
    new = (
        (*arrays[:2], *arrays[6:7])[: len(first)],
        (*arrays[2:4], *arrays[7:])[: len(second)],
        arrays[4],
        None if low is None else arrays[5],
    )
    return tuple(jax.tree.leaves(new))


def _of_models(scalars: Sequence[Array], shape: tuple[int, ...]) -> list[Array]:
    """Scalars [1] as they are, or [models] if `jax.vmap` has given them axes in front."""
    longer = [axis for each in scalars for axis, size in enumerate(each.shape) if size > 1]
    of_models = shape[: max(longer) + 1] if longer else ()
    every = (*of_models, *[1] * (len(shape) - len(of_models)))
    return [jnp.broadcast_to(each, every).reshape(-1) for each in scalars]
