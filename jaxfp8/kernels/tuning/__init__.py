"""Timing every backend of a matmul, and the timings that choose the fastest."""
