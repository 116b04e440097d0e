"""`Returned`: the pair that `fp8.convert` returns, with errors if it is used as the model."""

from typing import Any, NamedTuple, NoReturn

from jaxfp8.conversion._coverage import Coverage


class Returned(NamedTuple):
    """A converted model and its table. Use as a model raises an error that says how to unpack.

    Attributes:
      model: the converted model.
      coverage: its table.

    Example:
      >>> pair = Returned({"w": 1.0}, Coverage(rows=()))
      >>> model, coverage = pair
      >>> hasattr(pair, "apply")
      False
    """

    model: Any
    coverage: Coverage

    def __getattr__(self, name: str) -> NoReturn:
        owner = "coverage" if hasattr(self.coverage, name) else "model"
        raise AttributeError(
            f"{self._called}, which has no attribute {name!r}. {_UNPACK}{owner}.{name}.", name=name
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise TypeError(f"{self._called}, which cannot be called. {_UNPACK}model(...).")

    @property
    def _called(self) -> str:
        return f"fp8.convert returned two values: ({type(self.model).__name__}, Coverage)"


_UNPACK = "Write model, coverage = fp8.convert(...), and then "
