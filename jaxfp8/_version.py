"""The version: `fp8.__version__`. The build reads it from this file (pyproject.toml)."""

__version__ = "0.1.0"
