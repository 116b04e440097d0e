"""FP8 times FP8."""
