"""The chips that FP8 code is written for. The user names a chip; nothing detects it."""

import dataclasses
import re
from typing import Literal

from jax.sharding import AbstractMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip and what it can do.

    Attributes:
      name: the name that users write.
      platform: jax's platform name.
      compute_capability: (major, minor) of an NVIDIA GPU; None for other chips.
      fp8_matmul: whether XLA can multiply FP8 in the hardware of this chip.
      block_scaled_matmul: whether its tensor cores apply the scales of tiles (MXFP8).
    """

    name: str
    platform: Literal["cpu", "cuda", "rocm", "tpu"]
    compute_capability: tuple[int, int] | None = None
    fp8_matmul: bool = False
    block_scaled_matmul: bool = False

    @property
    def is_hopper(self) -> bool:
        """Whether it is an NVIDIA Hopper, for which some kernels are written."""
        return (self.compute_capability or (0, 0))[0] == 9


# cuBLASLt multiplies FP8 from compute capability 8.9 on (cuBLAS documentation, "8-bit floating
# point"). ROCm and TPU have FP8 units, too. But nothing here was compiled or run for them, so they
# take the portable path.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="cpu", platform="cpu"),
        Chip(name="a100", platform="cuda", compute_capability=(8, 0)),
        Chip(name="l4", platform="cuda", compute_capability=(8, 9), fp8_matmul=True),
        Chip(name="l40s", platform="cuda", compute_capability=(8, 9), fp8_matmul=True),
        Chip(name="h100", platform="cuda", compute_capability=(9, 0), fp8_matmul=True),
        Chip(name="h200", platform="cuda", compute_capability=(9, 0), fp8_matmul=True),
        Chip(
            name="b200",
            platform="cuda",
            compute_capability=(10, 0),
            fp8_matmul=True,
            block_scaled_matmul=True,
        ),
        Chip(name="mi300x", platform="rocm"),
        Chip(name="tpu", platform="tpu"),
    )
}


def chip_named(name: str) -> Chip:
    """The chip with this name.

    Raises:
      ValueError: for a name that is not in `CHIPS`.

    Example:
      >>> chip_named("h200").compute_capability
      (9, 0)
    """
    if not isinstance(name, str) or name not in CHIPS:
        raise ValueError(f"chip={name!r} is unknown; use one of {sorted(CHIPS)}.")
    return CHIPS[name]


def compute_capability_of(mesh: AbstractMesh) -> int | None:
    """The compute capability of a mesh's GPUs, as one number: 90 for an H200.

    A program can be compiled for a mesh of GPUs that this machine does not have. So the mesh is
    asked, not the driver. The result is None if the mesh names no NVIDIA GPU of `CHIPS`. Then
    jax-triton asks the GPU.

    Example:
      >>> from jax.sharding import AbstractDevice
      >>> h100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
      >>> compute_capability_of(AbstractMesh((), (), abstract_device=h100))
      90
    """
    kind = mesh.abstract_device.device_kind if mesh.abstract_device is not None else ""
    for word in re.split(r"[ -]", kind.lower()):
        if word in CHIPS and (version := CHIPS[word].compute_capability):
            return 10 * version[0] + version[1]
    return None
