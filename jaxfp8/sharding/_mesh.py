"""MeshRoles: what each axis of a mesh is for."""

import dataclasses
from typing import Any, Literal, Self, TypeAlias

import jax

from jaxfp8.sharding._shard import Shard
from jaxfp8.sharding._specs import mesh_axes

Role: TypeAlias = Literal["data", "fsdp", "tensor", "sequence", "context", "expert", "pipeline"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRoles:
    """The mesh axis that plays each role; None where none does.

    A model written in roles runs on every mesh.

    One axis may play several roles that never split one array twice: tensor and sequence, say.

    Attributes:
      data: batches are split, weights are whole.
      fsdp: batches are split, and weights, which matmuls gather (fully sharded data parallelism).
      tensor: features are split (tensor parallelism).
      sequence: tokens are split between the matmuls that features are split in (sequence
        parallelism).
      context: tokens are split everywhere (context parallelism).
      expert: experts are split.
      pipeline: layers are split into stages. The only axis that amaxes are never combined over.

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
            if name is not None and not isinstance(name, str):
                raise TypeError(f"{role}={name!r} must be the name of a mesh axis, or None.")
            if role != "pipeline" and name is not None and name == self.pipeline:
                raise ValueError(
                    f"axis {name!r} cannot be {role} and pipeline: amaxes are combined over the "
                    "one and never over the other."
                )

    def axis(self, role: Role | str) -> str | None:
        """The axis that plays a role.

        Raises:
          ValueError: if there is no such role.

        Example:
          >>> MeshRoles(tensor="model").axis("tensor")
          'model'
        """
        roles = dataclasses.asdict(self)
        if role not in roles:
            raise ValueError(f"role={role!r} is none of {list(roles)}.")
        return roles[role]

    def spec(self, *entries: Role | tuple[Role, ...] | None) -> jax.P:
        """A partition spec in roles, an entry for each array axis.

        Roles that no axis plays drop out.

        Raises:
          ValueError: if there is no such role, or a mesh axis would split two array axes.

        Example:
          >>> MeshRoles(fsdp="fsdp").spec("fsdp", "tensor")  # of a weight
          P('fsdp', None)
        """
        axes = [
            tuple(
                dict.fromkeys(
                    axis for role in mesh_axes(entry) if (axis := self.axis(role)) is not None
                )
            )
            for entry in entries
        ]
        used = [axis for group in axes for axis in group]
        if twice := sorted({axis for axis in used if used.count(axis) > 1}):
            raise ValueError(f"entries {entries} split two array axes over the mesh axes {twice}.")
        return jax.P(*(group if len(group) > 1 else group[0] if group else None for group in axes))

    def shard(self, axis: int, *roles: Role) -> Shard | None:
        """For `x_shard=` and `w_shard=`: the operand is split along an array axis.

        None if no mesh axis plays the roles.

        Example:
          >>> MeshRoles(fsdp="fsdp").shard(0, "fsdp")
          Shard(axis=0, axis_name='fsdp')
        """
        (entry,) = self.spec(roles)
        return None if entry is None else Shard(axis, entry)

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """Every axis but pipeline.

        For `reduce_axes=` inside `jax.shard_map`, of layers that are split over all of them.

        Leave out the expert axis in layers of experts, because each expert has its own amaxes. With
        per-row scales, leave out an axis over which x and w both vary, if it does not split the
        contraction.

        Example:
          >>> MeshRoles(data="data", pipeline="pipe").reduce_axes
          ('data',)
        """
        axes = dataclasses.asdict(self)
        return tuple(
            dict.fromkeys(
                name for role, name in axes.items() if role != "pipeline" and name is not None
            )
        )

    def check(self, mesh: Any) -> Self:
        """These roles, if the mesh has their axes and no other.

        Args:
          mesh: a `jax.sharding.Mesh` or `AbstractMesh`.

        Raises:
          ValueError: for an axis that the mesh does not have, or one of more than one device that
            plays no role.

        Example:
          >>> import jax
          >>> MeshRoles(data="data").check(jax.make_mesh((1,), ("data",))).data
          'data'
        """
        roles = {role: name for role, name in dataclasses.asdict(self).items() if name is not None}
        if missing := {role: name for role, name in roles.items() if name not in mesh.axis_names}:
            raise ValueError(
                f"the mesh has axes {list(mesh.axis_names)}; it lacks those of the roles {missing}."
            )
        idle = [
            name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in roles.values()
        ]
        if idle:
            raise ValueError(
                f"the mesh axes {idle} play no role; every device along them would do the same."
            )
        return self
