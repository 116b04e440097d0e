"""How a call becomes three matmuls, with gradients."""
