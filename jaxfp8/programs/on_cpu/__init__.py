"""Runs a program that was compiled for a GPU on a CPU."""
