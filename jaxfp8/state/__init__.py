"""Quantizer state: what it is, how it leaves the backward pass, and what a step makes of it."""
