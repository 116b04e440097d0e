"""The chips that FP8 code is written for. A chip is named by the user, never detected."""

import dataclasses
import re
from typing import Literal

from jax.sharding import AbstractMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip by what it can do.

    Attributes:
      name: as users type it.
      platform: jax's platform name.
      compute_capability: of an NVIDIA GPU, (major, minor); None elsewhere.
      fp8_matmul: whether it multiplies FP8 in hardware by a route that XLA can take.
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
# point"). ROCm and TPU have FP8 units too, but nothing here was ever compiled or run for them: they
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
    """The chip of that name.

    Raises:
      ValueError: for a name that is not in the table.

    Example:
      >>> chip_named("h200").compute_capability
      (9, 0)
    """
    if not isinstance(name, str) or name not in CHIPS:
        raise ValueError(f"chip={name!r} is unknown; use one of {sorted(CHIPS)}.")
    return CHIPS[name]


def compute_capability_of(mesh: AbstractMesh) -> int | None:
    """That of the GPUs of which a mesh is made, 90 for an H200.

    None if it tells of none that is in the table.

    A program can be compiled for a mesh of GPUs that are not there; without one, what compiles a
    kernel asks the GPU.

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
