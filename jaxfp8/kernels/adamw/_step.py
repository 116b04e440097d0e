"""The constants of AdamW."""

import dataclasses

GROUP = 128
"""How many values share a scale in a moment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """The constants of one parameter's updates, as in `optax.adamw`.

    Example:
      >>> AdamWStep(b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, weight_decay=0.0).b1
      0.9
    """

    b1: float
    b2: float
    eps: float
    eps_root: float
    weight_decay: float
