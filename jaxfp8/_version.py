"""The version, for `fp8.__version__` and for the package that is built (pyproject.toml reads it here)."""

__version__ = "0.1.0"
