"""The grouped matmul: the rows of each group of an array times that group's own matrix."""
