"""What programs are compiled for.

The GPU at hand, one that only a description of exists, or the CPU in a dry run.
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
"""`<chip>.txtpb`, XLA's description of a chip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One device.

    Attributes:
      chip: as `fp8.Kernels` takes it.
      device: of jax; that of a description cannot run anything.
      mesh: of a described device alone, from which Pallas reads what it is; None for one that is
        there.
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
        """In which programs for it are traced."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def here(chip: str | None) -> Target:
    """The first device that jax sees.

    Raises:
      SystemExit: for a GPU whose name tells no chip, if none is given.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        raise SystemExit(
            "no GPU is visible; --dry-run goes through everything on a CPU, --compile-only h200 "
            "compiles."
        )
    words = device.device_kind.lower().split()
    known = [
        name
        for name in ("a100", "l4", "l40s", "h100", "h200", "b200")
        if any(w.startswith(name) for w in words)
    ]
    if chip is None and not known:
        raise SystemExit(
            f"{device.device_kind!r} is not known; name what it is like with --chip, h200 for "
            "instance."
        )
    return Target(chip=chip or max(known, key=len), device=device)


def described(chip: str) -> Target:
    """A chip that is not there.

    Raises:
      SystemExit: for one without a description.
    """
    path = DESCRIPTIONS / f"{chip}.txtpb"
    if not path.exists():
        raise SystemExit(
            f"no description of {chip!r}; there are "
            f"{sorted(p.stem for p in DESCRIPTIONS.glob('*.txtpb'))}."
        )
    topology = topologies.get_topology_desc(
        chip, "cuda", topology="1x1x1", target_config=path.read_text()
    )
    mesh = Mesh(np.array(topology.devices), ("device",), axis_types=(AxisType.Auto,))
    return Target(chip=chip, device=topology.devices[0], mesh=mesh)


def cpu() -> Target:
    return Target(chip="cpu", device=jax.devices("cpu")[0])
