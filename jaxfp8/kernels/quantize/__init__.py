"""Kernels of the cast that find its scales."""
