"""What kernels in Triton share."""
