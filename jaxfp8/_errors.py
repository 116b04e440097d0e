"""The error of quantizer state."""


class FP8StateError(ValueError):
    """Quantizer state is missing, of another recipe, or would be lost; the message says which and how to cure it."""


class UncollectedStateError(FP8StateError):
    """A matmul is differentiated, and its state belongs to no `value_and_grad` of this library."""
