"""What kernels in Pallas (Mosaic GPU) share."""
