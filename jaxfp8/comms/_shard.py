"""Shard: how an operand of a matmul is split, so that the matmul gathers it in FP8."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shard:
    """An operand that is one device's part, along an axis, of the whole that the matmul reads.

    It is quantized where it lies, with the scales of the whole, and gathered in FP8: for fprop, and once more for the matmul
    of the backward pass that reads it, so that only the part is saved. Its gradient is reduce-scattered: summed over the
    mesh axis, each device keeping its part.

    Attributes:
      axis: of the array, along which it is split.
      axis_name: of the mesh, over which it is split.

    Example:
      >>> Shard(0, "fsdp")  # fully sharded data parallelism: rows of w
      Shard(axis=0, axis_name='fsdp')
    """

    axis: int
    axis_name: str

    def __post_init__(self) -> None:
        if type(self.axis) is not int or not isinstance(self.axis_name, str):
            raise TypeError(
                f"axis={self.axis!r}, axis_name={self.axis_name!r} must be an axis of the array and the name of a mesh axis: "
                'Shard(0, "fsdp").'
            )
