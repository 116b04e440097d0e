"""A quantizer with state that is not of the library: the smoothed amax of the last steps."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

import jaxfp8 as fp8
from jaxfp8.quantizers import AbstractQuantizer, RowState


@dataclasses.dataclass(frozen=True)
class Smoothed(AbstractQuantizer):
    """The scale comes from an exponential moving average of amaxes."""

    stateful: ClassVar[bool] = True
    value_format: fp8.quantizers.Format = fp8.E4M3
    decay: float = 0.5

    def update(self, row, amax):
        usable, before = jnp.isfinite(amax) & (amax > 0), row.amax_history[..., 0]
        mean = jnp.where(before > 0, self.decay * before + (1 - self.decay) * amax, amax)
        mean = jnp.where(usable, mean, before)
        scale = jnp.where(mean > 0, self.scale_of_amax(mean).scale, 0.0)
        return RowState(
            scale, mean[..., None], row.nonfinite_steps + jnp.isinf(amax).astype(scale.dtype)
        )


def recipe():
    x, g = Smoothed(), Smoothed(value_format=fp8.E5M2, decay=0.25)
    pair = lambda lhs, rhs: fp8.recipes.Operands(lhs=lhs, rhs=rhs)
    return fp8.Recipe(name="smoothed", fprop=pair(x, x), dgrad=pair(g, x), wgrad=pair(x, g))
