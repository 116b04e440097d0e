"""The dispatch loop: the one place that calls a backend of an operation.

`plan/` decides which backends are tried, and in which order. Here they are only names.
"""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from jaxfp8.kernels._on_cuda import on_cuda

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
      elsewhere: the function that other platforms run, see `on_cuda`.

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
        return on_cuda(getattr(module, self.function), self.elsewhere, *args, **kwargs)
