"""The error of quantizer state."""


class FP8StateError(ValueError):
    """Quantizer state is missing, of another recipe, or would be lost.

    The message says which and how to cure it.
    """


class UncollectedStateError(FP8StateError):
    """A matmul with quantizer state is differentiated outside of `fp8.value_and_grad`."""
