"""The device that programs are compiled for.

It is the GPU of this machine, a chip of which only a description exists, or the CPU in a dry run.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

DESCRIPTIONS = Path(__file__).parents[2] / "tests" / "deviceless"
"""The folder of `<chip>.txtpb`, XLA's description of a chip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One device.

    Attributes:
      chip: its name, as in `fp8.Kernels`.
      device: the device of jax. A described device cannot run anything.
      mesh: a mesh of the described device, from which Pallas reads the kind of device. None for a
        device of this machine.
    """

    chip: str
    device: Any
    mesh: Mesh | None = None

    @property
    def is_gpu(self) -> bool:
        return self.chip != "cpu"

    @property
    def sharding(self) -> Any:
        return (
            SingleDeviceSharding(self.device)
            if self.mesh is None
            else NamedSharding(self.mesh, PartitionSpec())
        )

    def context(self) -> Any:
        """The context in which programs for this device are traced."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def here(chip: str | None) -> Target:
    """The first device that jax sees.

    Raises:
      SystemExit: without a GPU. Also if `chip` is None and the name of the GPU is unknown.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        raise SystemExit(
            "no GPU is visible. --dry-run runs everything on a CPU, and --compile-only h200 "
            "compiles for that chip."
        )
    words = device.device_kind.lower().split()
    known = [
        name
        for name in ("a100", "l4", "l40s", "h100", "h200", "b200")
        if any(w.startswith(name) for w in words)
    ]
    if chip is None and not known:
        raise SystemExit(
            f"the chip of {device.device_kind!r} is not known. Give a similar chip, for instance "
            "--chip h200."
        )
    return Target(chip=chip or max(known, key=len), device=device)


def described(chip: str) -> Target:
    """A chip that this machine does not have.

    Raises:
      SystemExit: for a chip without a description.
    """
    path = DESCRIPTIONS / f"{chip}.txtpb"
    if not path.exists():
        raise SystemExit(
            f"there is no description of {chip!r}; use one of "
            f"{sorted(p.stem for p in DESCRIPTIONS.glob('*.txtpb'))}."
        )
    topology = topologies.get_topology_desc(
        chip, "cuda", topology="1x1x1", target_config=path.read_text()
    )
    mesh = Mesh(np.array(topology.devices), ("device",), axis_types=(AxisType.Auto,))
    return Target(chip=chip, device=topology.devices[0], mesh=mesh)


def cpu() -> Target:
    return Target(chip="cpu", device=jax.devices("cpu")[0])
