"""How a chip casts and multiplies."""
