"""The scaled matmul in Pallas (Mosaic GPU) for Hopper."""
