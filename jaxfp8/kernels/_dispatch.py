"""The dispatch loop: the one place that picks a backend for an operation."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxfp8._typing import Implementation


@runtime_checkable
class Chooser(Protocol):
    """What knows which backend is good for a case: `fp8.Timings`."""

    def choose(self, *args: Any, **kwargs: Any) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Names of backends, best first, each with the extra arguments that it shall get.

        `args` and `kwargs` are the arguments of the call.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementations:
    """Backends by name for the casts and the matmuls of one call; None takes the first that can.

    `matmuls` may be `fp8.Timings` as well, which take what was fastest.

    Raises:
      TypeError: for what is neither.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> kernels = fp8.Implementations(casts="reference")
      >>> x, recipe = 7 * jnp.ones((2, 2)), fp8.recipes.current()
      >>> fp8.dot(x, 7 * jnp.eye(2), recipe=recipe, implementation=kernels)
      Array([[49., 49.],
             [49., 49.]], dtype=float32)
    """

    casts: Implementation = None
    matmuls: Implementation | Chooser = None

    def __post_init__(self) -> None:
        check_backend_name("casts", self.casts)
        _check("matmuls", self.matmuls)


def check_backend_name(argument: str, chosen: object) -> None:
    """Raise TypeError unless a backend of casts can be chosen by it.

    Example:
      >>> check_backend_name("implementation", "xla")
    """
    if not isinstance(chosen, str | None):
        raise TypeError(
            f"{argument}={_described(chosen)} must be a backend by name, or None; timings are of "
            "matmuls: fp8.Implementations(matmuls=timings)."
        )


def _described(chosen: object) -> str:
    """Of timings the type alone, for they are long."""
    return f"{type(chosen).__name__}(...)" if isinstance(chosen, Chooser) else repr(chosen)


def _check(name: str, chosen: object) -> None:
    """Raise TypeError unless a backend can be chosen by it."""
    if isinstance(chosen, type) or not isinstance(chosen, str | None | Chooser):
        raise TypeError(
            f"{name}={chosen!r} must be a backend by name, fp8.Timings for matmuls, or None."
        )


def dispatch(
    operation: str,
    backends: Mapping[str, Callable[..., Any]],
    implementation: Implementation | Chooser,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the first backend that can do the case.

    A backend that cannot says so with NotImplementedError and its reason. With
    `implementation=None` the backends are tried in the order of the table; a backend that is asked
    for by name is the only one tried, and fails loudly. What a `Chooser` names comes before the
    table.

    Args:
      operation: its name, for messages.
      backends: name -> function, best first.
      implementation: a name of the table, a chooser, or None.
      *args: for the backend.
      **kwargs: for the backend.

    Raises:
      TypeError: for an implementation that is neither.
      ValueError: for an unknown name, the chooser's too.
      NotImplementedError: from the backend that was asked for by name.
      ExceptionGroup: of every reason, if no backend could.

    Example:
      >>> dispatch("double", {"xla": lambda x: 2 * x}, None, 3)
      6
    """
    if isinstance(implementation, str):
        if implementation not in backends:
            raise ValueError(
                f"implementation={implementation!r} of {operation} is unknown; use None or one of "
                f"{sorted(backends)}."
            )
        return backends[implementation](*args, **kwargs)
    if implementation is not None:
        _check("implementation", implementation)
    reasons: list[Exception] = []
    chosen = () if implementation is None else tuple(implementation.choose(*args, **kwargs))
    if unknown := {name for name, _ in chosen} - set(backends):
        raise ValueError(
            f"{_described(implementation)} has the backends {sorted(unknown)} of {operation}, "
            f"which are unknown, of {sorted(backends)}; measure again."
        )
    for name, told in (*chosen, *((name, {}) for name in backends)):
        try:
            return backends[name](*args, **kwargs, **told)
        except NotImplementedError as reason:
            reasons.append(NotImplementedError(f"{name}: {reason}"))
    raise ExceptionGroup(f"no backend of {operation} can do this case", reasons)


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend that is known by name. The first call imports it.

    `import jaxfp8` does not import Pallas, which would take most of the time
    (`benchmarks/import_time.py`). In jax 0.10 Pallas needs absl, which jax does not install. The
    module of a `Backend` imports Pallas or Triton at its top. `tests/test_floors.py` reads `module`
    as an import of the file that names it.

    Attributes:
      module: the file, "jaxfp8.kernels.cast._mosaic" for instance.
      function: its name in there.
      needs: what has to be installed for it, for the message.

    Raises:
      NotImplementedError: when called, if something that it needs cannot be imported: such a
        backend cannot do the case.

    Example:
      >>> Backend("jaxfp8.kernels.cast._tomorrow", "cast", needs="The future")
      Backend(module='jaxfp8.kernels.cast._tomorrow', function='cast', needs='The future')
    """

    module: str
    function: str
    needs: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            # An import error inside jaxfp8 is a bug. Do not try the next backend.
            if (error.name or "").partition(".")[0] == __name__.partition(".")[0]:
                raise
            raise NotImplementedError(f"{self.needs} cannot be imported: {error}") from error
        return getattr(module, self.function)(*args, **kwargs)
