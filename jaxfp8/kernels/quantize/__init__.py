"""High precision to FP8, with the scales of the array's own amaxes."""
