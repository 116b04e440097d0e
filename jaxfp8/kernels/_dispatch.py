"""The dispatch loop, what runs on other platforms, and the chips that FP8 code is written for.

`plan/` decides which backends are tried, and in which order. Here they are only names.
"""

import dataclasses
import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.lax import platform_dependent
from jax.sharding import AbstractMesh

from jaxfp8.sharding._amax import varying, varying_type

# A kernel for CUDA and its replacement on other platforms, in one program.
#
# A program that is written for a GPU can be debugged on a CPU without a change. XLA compiles only
# the branch of the platform. The kernel is traced on every platform, so what it needs must be
# installed.


def _on_cuda(
    kernel: Callable[..., Any], elsewhere: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`kernel(*args, **kwargs)` on CUDA, and `elsewhere(like, *args, **kwargs)` on other platforms.

    Args:
      kernel: returns a tree of arrays.
      elsewhere: returns a tree of the same structure, shapes and dtypes. `like` is that tree, with
        `jax.ShapeDtypeStruct`s as leaves.
      *args: trees. Leaves that are no arrays are static.
      **kwargs: trees, too.

    Raises:
      NotImplementedError: if the kernel raises it when it is traced.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    dynamic = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            given = iter(arrays)
            args, kwargs = jax.tree.unflatten(
                structure, [next(given) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
            )
            return function(*args, **kwargs)

        return run

    # The kernel is traced before the choice of a platform, because `elsewhere` needs the types of
    # its results. The branch for CUDA runs this trace.
    traced, like = jax.make_jaxpr(of_arrays(kernel), return_shape=True)(*dynamic)
    of_results: Any = jax.tree.structure(like)

    def cuda(*arrays: Any) -> list[Any]:
        return list(jaxpr_as_fun(traced)(*arrays))

    def other(*arrays: Any) -> list[Any]:
        results = of_arrays(lambda *a, **k: elsewhere(like, *a, **k))(*arrays)
        assert of_results == jax.tree.structure(results), (results, like)
        leaves = jax.tree.leaves(results)
        return [_as(x, aval) for x, aval in zip(leaves, traced.out_avals, strict=True)]

    return jax.tree.unflatten(of_results, platform_dependent(*dynamic, cuda=cuda, default=other))


def _as(x: jax.Array, aval: Any) -> jax.Array:
    """x with the mesh axes of a type: those over which it varies, and those that split it.

    The branches of `platform_dependent` must return equal types.
    """
    if missing := varying_type(aval) - varying(x):
        x = lax.pcast(x, tuple(sorted(missing)), to="varying")
    mesh = aval.sharding.mesh
    if not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types:
        x = jax.sharding.reshard(x, aval.sharding)
    return x


# The dispatch loop: the one place that calls a backend of an operation.

Attempt: TypeAlias = tuple[str, Mapping[str, Any]]
"""The name of a backend, and the extra arguments that it gets."""


def dispatch(
    operation: str,
    backends: Mapping[str, Callable[..., Any]],
    attempts: Iterable[str | Attempt],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the first backend that can do the case.

    A backend that cannot do the case raises NotImplementedError with the reason. Then the next one
    is tried, and the logger "jaxfp8" warns of each reason once. If there is only one backend, its
    error is raised.

    Args:
      operation: the name of the operation, for messages.
      backends: name -> function.
      attempts: names of backends, best first. A name may come with extra arguments.
      *args: for the backend.
      **kwargs: for the backend.

    Raises:
      NotImplementedError: if the only backend cannot do the case.
      ExceptionGroup: of every reason, if none of several backends can do the case.

    Example:
      >>> dispatch("double", {"xla": lambda x: 2 * x}, ["xla"], 3)
      6
    """
    attempts = tuple(attempts)
    reasons: list[tuple[str, NotImplementedError]] = []
    for attempt in attempts:
        name, told = (attempt, {}) if isinstance(attempt, str) else attempt
        try:
            return _backend(operation, backends, name)(*args, **kwargs, **told)
        except NotImplementedError as reason:
            reasons.append((name, reason))
            if len(attempts) > 1:
                _say(f"{operation}: {name} cannot do a case, another backend does it: {reason}")
    if len(reasons) == 1:
        raise reasons[0][1]
    raise ExceptionGroup(
        f"no backend of {operation} can do this case",
        [NotImplementedError(f"{name}: {reason}") for name, reason in reasons],
    )


@functools.lru_cache(maxsize=4096)
def _say(what: str) -> None:
    """Log a message once. `plan/` chooses by shape, so it cannot foresee every case of a layer."""
    logging.getLogger("jaxfp8").warning(what)


def _backend(
    operation: str, backends: Mapping[str, Callable[..., Any]], name: str
) -> Callable[..., Any]:
    if name not in backends:
        raise NotImplementedError(
            f"There is no backend {name!r} of {operation}, only {sorted(backends)}. Name one of "
            "these."
        )
    return backends[name]


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend for CUDA, given by name. The first call imports it.

    On other platforms the same program runs `elsewhere`.

    `import jaxfp8` does not import Pallas, because Pallas would take most of the import's time
    (`benchmarks/structure/import_time.py`). Also, Pallas of jax 0.10 needs absl, which jax does not
    install. The module of a `Backend` imports Pallas or Triton at its top. `tests/test_floors.py`
    reads `module` as an import of the file that names it.

    Attributes:
      module: the module to import, for instance "jaxfp8.kernels.cast._mosaic".
      function: the name of the backend in that module.
      needs: what must be installed, for the message.
      elsewhere: the function that other platforms run, see `_on_cuda`.

    Raises:
      NotImplementedError: when called, if something that it needs cannot be imported. Then the next
        backend is tried.

    Example:
      >>> tomorrow = Backend("jaxfp8.kernels.cast._tomorrow", "cast", needs="It", elsewhere=print)
      >>> tomorrow.needs
      'It'
    """

    module: str
    function: str
    needs: str
    elsewhere: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            # An import error inside jaxfp8 is a bug. Do not try the next backend.
            if (error.name or "").partition(".")[0] == __name__.partition(".")[0]:
                raise
            raise NotImplementedError(f"{self.needs} cannot be imported: {error}") from error
        return _on_cuda(getattr(module, self.function), self.elsewhere, *args, **kwargs)


# The chips that FP8 code is written for. The user names a chip; nothing detects it.


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
_CHIPS = {
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
      ValueError: for a name that is not in `_CHIPS`.

    Example:
      >>> chip_named("h200").compute_capability
      (9, 0)
    """
    if not isinstance(name, str) or name not in _CHIPS:
        raise ValueError(f"chip={name!r} is unknown; use one of {sorted(_CHIPS)}.")
    return _CHIPS[name]


def compute_capability_of(mesh: AbstractMesh) -> int | None:
    """The compute capability of a mesh's GPUs, as one number: 90 for an H200.

    A program can be compiled for a mesh of GPUs that this machine does not have. So the mesh is
    asked, not the driver. The result is None if the mesh names no NVIDIA GPU of `_CHIPS`. Then
    jax-triton asks the GPU.

    Example:
      >>> from jax.sharding import AbstractDevice
      >>> h100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
      >>> compute_capability_of(AbstractMesh((), (), abstract_device=h100))
      90
    """
    kind = mesh.abstract_device.device_kind if mesh.abstract_device is not None else ""
    for word in re.split(r"[ -]", kind.lower()):
        if word in _CHIPS and (version := _CHIPS[word].compute_capability):
            return 10 * version[0] + version[1]
    return None
