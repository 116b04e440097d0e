"""Timing backends against each other, and the table that chooses by it."""
