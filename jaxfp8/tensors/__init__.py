"""QuantizedTensor: FP8 values together with their scale. Here the forms that matmul kernels read."""

from jaxfp8.tensors._scale_layout import BlackwellLayout as BlackwellLayout
from jaxfp8.tensors._scale_layout import HopperLayout as HopperLayout
from jaxfp8.tensors._scale_layout import MatmulReady as MatmulReady
from jaxfp8.tensors._scale_layout import matmul_ready as matmul_ready
