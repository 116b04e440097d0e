"""High precision to FP8."""
