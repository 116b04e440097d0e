"""The error of quantizer state."""


class FP8StateError(ValueError):
    """Quantizer state is missing, belongs to another recipe, or would be lost.

    The message says what is wrong and what to write instead.
    """


class UncollectedStateError(FP8StateError):
    """A matmul with quantizer state is differentiated outside of `fp8.value_and_grad`."""
