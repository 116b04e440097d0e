"""Weights that a model holds in FP8. `fp8.quantize_params` makes them."""

from jaxfp8.weights._quantized_weight import QuantizedWeight as QuantizedWeight
from jaxfp8.weights._quantized_weight import WeightAxes as WeightAxes
