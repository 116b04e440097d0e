"""Differentiable functions of arrays, usable without Flax."""
