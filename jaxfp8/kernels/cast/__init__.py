"""The cast from high precision to FP8."""
