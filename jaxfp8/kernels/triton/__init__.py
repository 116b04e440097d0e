"""Code that the kernels in Triton share."""
