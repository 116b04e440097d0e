"""Quantizer state: what it is, how it leaves the backward pass, and what a step makes of it."""

from jaxfp8.state._state import MatmulState as MatmulState
