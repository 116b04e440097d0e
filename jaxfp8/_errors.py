"""The error of quantizer state."""


class FP8StateError(ValueError):
    """Quantizer state is missing, of another recipe, or would be lost; the message says which and how to cure it."""
