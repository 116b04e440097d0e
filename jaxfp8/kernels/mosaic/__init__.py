"""Code that the kernels in Pallas (Mosaic GPU) share."""
