"""Devices and meshes of the examples.

Without a GPU the examples run on eight CPU devices. The command line names the mesh.
"""

import math

import jax
from jax.sharding import AxisType, Mesh


def force_cpu_devices(count: int) -> None:
    """Force `count` CPU devices.

    It has no effect on a GPU or TPU. Call it before jax looks for devices.
    """
    jax.config.update("jax_num_cpu_devices", count)


def make_mesh(sizes: str, axes: tuple[str, ...]) -> Mesh:
    """A mesh over all devices of all processes from `axis=size,...`.

    An axis that `sizes` does not name has size 1.

    Raises:
      ValueError: for an axis that is unknown or given twice, and for a size that is no positive
        number. Also if the product of the sizes is not the number of devices.
    """
    given: dict[str, int] = {}
    for part in sizes.split(","):
        axis, _, size = part.partition("=")
        if not part:
            raise ValueError(
                f"--mesh {sizes}: an axis is empty; drop the extra comma, as in --mesh {axes[0]}=8."
            )
        if axis not in axes:
            raise ValueError(f"--mesh {sizes}: there is no axis {axis!r}; use {', '.join(axes)}.")
        if axis in given:
            raise ValueError(
                f"--mesh {sizes}: {axis} is given more than once; give each axis one size."
            )
        if not (size.isascii() and size.isdecimal() and 0 < len(size) < 10) or int(size) == 0:
            raise ValueError(f"--mesh {sizes}: {axis} needs a size of at least 1, as in {axis}=2.")
        given[axis] = int(size)
    shape = tuple(given.get(axis, 1) for axis in axes)
    if math.prod(shape) != jax.device_count():
        raise ValueError(
            f"--mesh {sizes} has {math.prod(shape)} devices, there are {jax.device_count()}; the "
            "product of the sizes must be the number of devices; write for instance --mesh "
            f"{axes[0]}={jax.device_count()}."
        )
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


def one_device(axes: tuple[str, ...]) -> Mesh:
    """A mesh of one device. A program compiles for it without communication."""
    return jax.make_mesh(
        (1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:1]
    )
