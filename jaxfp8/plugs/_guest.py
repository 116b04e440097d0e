"""The import of a framework by its plug."""

import importlib
from typing import Any


def guest(module: str, package: str) -> Any:
    """A module of a framework.

    Args:
      module: the name of the module.
      package: what `pip install` calls it.

    Returns:
      The module.

    Raises:
      ImportError: if the module cannot be imported. The message names the package to install.

    Example:
      >>> guest("jax.numpy", "jax").__name__
      'jax.numpy'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this plug needs the module {module!r}, and importing it failed: {error}. Install it "
            f"with: pip install {package}",
            name=module,
        ) from error
