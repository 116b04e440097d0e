"""Rows of groups: which rows belong to which group, and how they come from other devices."""

import dataclasses
import functools
from typing import Literal

import jax

from jaxfp8._typing import Array, Matmul
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.sharding._route import Route

_RETURNS: dict[Matmul, str | None] = {"fprop": "g", "dgrad": "x", "wgrad": None}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["groups", "route"], meta_fields=["routed"]
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a grouped matmul.

    Attributes:
      groups: which rows belong to which group.
      route: how rows come from other devices, if `routed` is not None.
      routed: the tensor that is sent to the devices of the groups (static). The tensor that has its
        shape is sent back: if x is sent, so is its gradient; if g is sent, it is that of y, which
        was sent. None if all rows are here.
    """

    groups: Groups
    route: Route | None = None
    routed: Literal["x", "g"] | None = None

    def returned(self, matmul: Matmul, result: Array) -> Array:
        """The result of a matmul, sent back to the devices of the tokens if they wait for it."""
        if self.route is None or _RETURNS[matmul] != self.routed:
            return result
        return self.route.to_tokens(result)
