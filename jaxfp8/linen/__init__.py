"""FP8 layers for flax.linen."""

from jaxfp8.linen._dot_general import FP8DotGeneral as FP8DotGeneral
from jaxfp8.linen._dot_general import FP8EinsumOp as FP8EinsumOp
from jaxfp8.linen._layers import FP8Dense as FP8Dense
from jaxfp8.linen._layers import FP8DenseGeneral as FP8DenseGeneral
from jaxfp8.linen._layers import FP8Einsum as FP8Einsum
from jaxfp8.linen._moe import FP8GroupedLinear as FP8GroupedLinear
from jaxfp8.linen._moe import FP8MoE as FP8MoE
from jaxfp8.linen._state import COLLECTION as COLLECTION
from jaxfp8.linen._state import state_specs as state_specs
from jaxfp8.linen._train_state import TrainState as TrainState
from jaxfp8.linen._train_state import add_state as add_state
