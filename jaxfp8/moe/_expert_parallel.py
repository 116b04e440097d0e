"""ExpertParallel: how tokens go to experts that are split over a mesh."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType

from jaxfp8._typing import Array
from jaxfp8.numerics._per_block import is_explicit
from jaxfp8.ops._route_tokens import check_capacity_factor
from jaxfp8.sharding._specs import mesh_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """How tokens go to experts that are split over a mesh. Hashable.

    Attributes:
      axis: the mesh axis that splits experts. None: every device has all experts.
      tokens: the mesh axes that split tokens, `axis` among them. Default: None. In an Auto mesh
        that is `axis` alone. In an Explicit mesh it is the axes in the type of x. Inside
        `jax.shard_map` with `check_vma=False` counts are summed over it.
      capacity_factor: see `fp8.moe.route`. Default: None, no choice is dropped.
      sent_in_fp8: see `fp8.moe.dispatch_matmul`. Default: True.
      gradient_sent_in_fp8: see `fp8.moe.matmul_combine`. Default: False.

    Raises:
      TypeError, ValueError: for a field of another type, and for `tokens` without `axis`.

    Example:
      >>> ExpertParallel(axis="expert", tokens=("data", "expert")).sent_in_fp8
      True
    """

    axis: str | None = None
    tokens: tuple[str, ...] | None = None
    capacity_factor: float | None = None
    sent_in_fp8: bool = True
    gradient_sent_in_fp8: bool = False

    def __post_init__(self) -> None:
        if self.axis is not None and not (isinstance(self.axis, str) and self.axis):
            raise TypeError(f"axis={self.axis!r} must be the name of a mesh axis, or None.")
        tokens = self.tokens
        if tokens is not None and not (
            isinstance(tokens, tuple) and all(isinstance(name, str) for name in tokens)
        ):
            raise TypeError(f"tokens={tokens!r} must be a tuple of names of mesh axes.")
        if tokens is not None and len(set(tokens)) != len(tokens):
            raise ValueError(f"tokens={tokens!r} has a mesh axis twice.")
        if self.axis is not None and tokens is not None and self.axis not in tokens:
            raise ValueError(
                f"tokens={tokens!r} lacks axis={self.axis!r}. Experts would get each token once "
                "from every device of the axis. Split tokens over it, too."
            )
        check_capacity_factor(self.capacity_factor)
        for name in ("sent_in_fp8", "gradient_sent_in_fp8"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False.")

    def axes_to_enter(self, x: Array) -> tuple[str, ...] | None:
        """The mesh axes that split tokens x [T, ...], to enter `jax.shard_map`. None: stay outside.

        Raises:
          ValueError: if the mesh has no such axis, if no mesh is set, or if the devices do not
            divide the tokens.
        """
        mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        tokens = self.tokens
        if tokens is None and is_explicit(x):
            split: Any = (*jax.typeof(x).sharding.spec, None)[0]
            tokens = mesh_axes(split)
        if tokens is None:
            tokens = () if self.axis is None else (self.axis,)
        wanted = dict.fromkeys((*tokens, *(() if self.axis is None else (self.axis,))))
        if missing := [name for name in wanted if name not in kinds]:
            raise ValueError(
                f"{missing} are no axes of the mesh here, {list(kinds)}. Set a mesh that has them "
                "with jax.set_mesh(mesh), or call this inside jax.shard_map."
            )
        is_free = self.axis is not None and kinds[self.axis] != AxisType.Manual
        if is_free and self.axis not in tokens:
            raise ValueError(
                f"x is split over {tokens}, but not over axis={self.axis!r}. Experts would get "
                "each token once from every device of the axis. Split tokens over it, too."
            )
        if AxisType.Manual in kinds.values():
            # The gradient of a shard_map inside another one does not compile (jax 0.10 to 0.12).
            if is_free:
                manual = [name for name, kind in kinds.items() if kind == AxisType.Manual]
                raise ValueError(
                    f"axis={self.axis!r} is not manual, but {manual} are. Call jax.shard_map over "
                    f"{self.axis!r}, too, or outside of it."
                )
            return None
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"the mesh has Auto and Explicit axes, {kinds}. Make all of them of one kind, or "
                "call this inside jax.shard_map over all axes."
            )
        devices = math.prod(mesh.shape[name] for name in tokens)
        if x.shape[0] % devices:
            raise ValueError(
                f"x has {x.shape[0]} tokens, but {tokens} split them over {devices} devices. Pass "
                f"a multiple of {devices} tokens, for instance by padding."
            )
        return tokens if tokens or AxisType.Explicit in kinds.values() else None


def check_parallel(parallel: object) -> None:
    """Raise TypeError unless the argument is an `ExpertParallel`, or None.

    Example:
      >>> check_parallel(ExpertParallel())
    """
    if parallel is not None and not isinstance(parallel, ExpertParallel):
        raise TypeError(
            f"parallel={parallel!r} must be an fp8.moe.ExpertParallel, or None if every device has "
            "all experts."
        )
