"""The version, for `fp8.__version__` and for pyproject.toml, which reads it here."""

__version__ = "0.1.0"
