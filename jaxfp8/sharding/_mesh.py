"""MeshRoles: the role of each axis of a mesh."""

import dataclasses
from typing import Any, Literal, Self, TypeAlias

import jax

from jaxfp8._check import check_one_of, check_type
from jaxfp8.sharding._shard import Shard
from jaxfp8.sharding._specs import mesh_axes

Role: TypeAlias = Literal["data", "fsdp", "tensor", "sequence", "context", "expert", "pipeline"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRoles:
    """The mesh axis that plays each role; None for a role that no axis plays.

    A model that is written in roles runs on every mesh. One mesh axis may play several roles if
    these never split two axes of one array, for instance tensor and sequence.

    Attributes:
      data: the axis that splits batches. Weights are replicated.
      fsdp: the axis that splits batches and weights. Matmuls gather the weights (fully sharded data
        parallelism).
      tensor: the axis that splits features (tensor parallelism).
      sequence: the axis that splits tokens outside of the matmuls whose features are split
        (sequence parallelism).
      context: the axis that splits tokens everywhere (context parallelism).
      expert: the axis that splits experts.
      pipeline: the axis that splits layers into stages. Amaxes are never reduced over it. It cannot
        play a second role.

    Example:
      >>> roles = MeshRoles(data="replica", fsdp="fsdp", tensor="model")
      >>> roles.spec(("data", "fsdp"), "sequence", None)  # of activations
      P(('replica', 'fsdp'), None, None)
      >>> roles.shard(0, "fsdp"), roles.shard(1, "sequence")
      (Shard(axis=0, axis_name='fsdp'), None)
    """

    data: str | None = None
    fsdp: str | None = None
    tensor: str | None = None
    sequence: str | None = None
    context: str | None = None
    expert: str | None = None
    pipeline: str | None = None

    def __post_init__(self) -> None:
        for role, name in dataclasses.asdict(self).items():
            check_type(role, name, str | None, "the name of a mesh axis, or None")
            if role != "pipeline" and name is not None and name == self.pipeline:
                raise ValueError(
                    f"axis {name!r} cannot be {role} and pipeline. Amaxes are never reduced over "
                    "pipeline; give each of the two roles its own mesh axis."
                )

    def axis(self, role: Role | str) -> str | None:
        """The mesh axis that plays a role; None if no axis plays it.

        Raises:
          ValueError: if there is no such role.

        Example:
          >>> MeshRoles(tensor="model").axis("tensor")
          'model'
        """
        roles = dataclasses.asdict(self)
        check_one_of("role", role, roles)
        return roles[role]

    def spec(self, *entries: Role | tuple[Role, ...] | None) -> jax.P:
        """A partition spec from roles.

        Args:
          *entries: one for each array axis: a role, a tuple of roles, or None. A role that no axis
            plays is left out.

        Raises:
          ValueError: if there is no such role, or a mesh axis would split two array axes.
        """
        played = [[self.axis(role) for role in mesh_axes(entry)] for entry in entries]
        axes = [tuple(dict.fromkeys(filter(None, names))) for names in played]
        used = [axis for group in axes for axis in group]
        if twice := sorted({axis for axis in used if used.count(axis) > 1}):
            raise ValueError(
                f"entries {entries} split two array axes over the mesh axes {twice}. Name the "
                "roles of a mesh axis in one entry."
            )
        return jax.P(*axes)

    def shard(self, axis: int, *roles: Role) -> Shard | None:
        """The `Shard` for `x_shard=` or `w_shard=`; None if no mesh axis plays the roles.

        Args:
          axis: the array axis that is split.
          *roles: the roles of the mesh axes that split it.
        """
        (entry,) = self.spec(roles)
        return None if entry is None else Shard(axis, entry)

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """Every mesh axis but pipeline, for `reduce_axes=` inside `jax.shard_map`.

        These are the axes of a layer that is split over all of them. In a layer of experts, leave
        out the expert axis, because each expert has its own amaxes. With per-row scales, leave out
        an axis over which x and w both vary, if it does not split the contracted axis.

        Example:
          >>> MeshRoles(data="data", pipeline="pipe").reduce_axes
          ('data',)
        """
        roles = dataclasses.asdict(self).items()
        return tuple(dict.fromkeys(name for role, name in roles if name and role != "pipeline"))

    def check(self, mesh: Any) -> Self:
        """Checks that the mesh has the axes of these roles and no other, and returns the roles.

        Args:
          mesh: a `jax.sharding.Mesh` or `AbstractMesh`.

        Raises:
          ValueError: if the mesh lacks an axis of a role, or if a mesh axis with more than one
            device plays no role.

        Example:
          >>> import jax
          >>> MeshRoles(data="data").check(jax.make_mesh((1,), ("data",))).data
          'data'
        """
        roles = {role: name for role, name in dataclasses.asdict(self).items() if name is not None}
        if missing := {role: name for role, name in roles.items() if name not in mesh.axis_names}:
            raise ValueError(
                f"the mesh has axes {list(mesh.axis_names)}, but none for the roles {missing}; add "
                "these axes, or leave the roles out."
            )
        idle = [
            name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in roles.values()
        ]
        if idle:
            raise ValueError(
                f"the mesh axes {idle} play no role, so all devices along them would do the same "
                "work. Give each axis a role."
            )
        return self
