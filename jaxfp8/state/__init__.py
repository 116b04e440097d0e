"""Quantizer state: what it holds, how it leaves the backward pass, and how a step updates it."""

from jaxfp8.state._gradient_channel import in_gradient_channel as in_gradient_channel
from jaxfp8.state._state import MatmulState as MatmulState
