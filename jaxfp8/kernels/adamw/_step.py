"""The constants of AdamW."""

import dataclasses

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
