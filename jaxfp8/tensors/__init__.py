"""QuantizedTensor: FP8 values together with their scale."""
