"""The kernels that update weights by AdamW."""

import dataclasses
from typing import Any

from jaxfp8.kernels._dispatch import Backend

GROUP = 128
"""How many values share a scale in a moment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """The constants of one parameter's updates, as in `optax.adamw`."""

    b1: float
    b2: float
    eps: float
    eps_root: float
    weight_decay: float


def _given(like: Any, weights: Any, scalars: Any, elsewhere: Any, *, steps: Any) -> Any:
    """What the caller has computed without the kernel."""
    del like, weights, scalars, steps
    return elsewhere


TRITON = Backend(
    "jaxfp8.kernels.adamw._triton",
    "update",
    needs="jax-triton (pip install 'jaxfp8[triton]')",
    platform="cuda",
    elsewhere=_given,
)
