"""FP8 layers for flax.nnx."""

from jaxfp8.nnx._dot_general import FP8DotGeneral as FP8DotGeneral
from jaxfp8.nnx._dot_general import FP8EinsumOp as FP8EinsumOp
from jaxfp8.nnx._layers import FP8Einsum as FP8Einsum
from jaxfp8.nnx._layers import FP8Linear as FP8Linear
from jaxfp8.nnx._layers import FP8LinearGeneral as FP8LinearGeneral
from jaxfp8.nnx._moe import FP8GroupedLinear as FP8GroupedLinear
from jaxfp8.nnx._moe import FP8MoE as FP8MoE
from jaxfp8.nnx._state import FP8State as FP8State
from jaxfp8.nnx._state import add_state as add_state
from jaxfp8.nnx._state import freeze as freeze
from jaxfp8.nnx._state import settle as settle
from jaxfp8.nnx._value_and_grad import commit as commit
from jaxfp8.nnx._value_and_grad import value_and_grad as value_and_grad
