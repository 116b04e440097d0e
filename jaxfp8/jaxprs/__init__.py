"""What JAX traced: readers of jaxprs."""
