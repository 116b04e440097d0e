"""The cast from high precision to FP8, with known scales."""
