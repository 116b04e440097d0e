"""Runs a program that was compiled for a GPU or a TPU on a CPU."""
