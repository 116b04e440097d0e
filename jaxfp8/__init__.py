"""FP8 training in JAX. `import jaxfp8 as fp8`."""

from jaxfp8 import checkpoint as checkpoint
from jaxfp8 import comms as comms
from jaxfp8 import conversion as conversion
from jaxfp8 import diagnostics as diagnostics
from jaxfp8 import linen as linen
from jaxfp8 import moe as moe
from jaxfp8 import nnx as nnx
from jaxfp8 import optim as optim
from jaxfp8 import plan as plan
from jaxfp8 import programs as programs
from jaxfp8 import prologues as prologues
from jaxfp8 import quantizers as quantizers
from jaxfp8 import recipes as recipes
from jaxfp8 import sharding as sharding
from jaxfp8 import state as state
from jaxfp8 import weights as weights
from jaxfp8._quantized_tensor import QuantizedTensor as QuantizedTensor
from jaxfp8._typing import FP8StateError as FP8StateError
from jaxfp8._version import __version__ as __version__
from jaxfp8.conversion._convert import convert as convert
from jaxfp8.diagnostics._memory_report import memory_report as memory_report
from jaxfp8.matmul._arrays import save_fp8_residuals as save_fp8_residuals
from jaxfp8.numerics._formats import E4M3 as E4M3
from jaxfp8.numerics._formats import E5M2 as E5M2
from jaxfp8.numerics._formats import E8M0 as E8M0
from jaxfp8.numerics._granularity import PerAxis as PerAxis
from jaxfp8.numerics._granularity import PerTensor as PerTensor
from jaxfp8.numerics._per_block import PerBlock as PerBlock
from jaxfp8.numerics._scale import ScaleRule as ScaleRule
from jaxfp8.ops._dot_general import dot as dot
from jaxfp8.ops._dot_general import dot_general as dot_general
from jaxfp8.ops._einsum import einsum as einsum
from jaxfp8.ops._quantize import fake_quantize as fake_quantize
from jaxfp8.ops._quantize import quantize as quantize
from jaxfp8.ops._quantize import scaled_matmul as scaled_matmul
from jaxfp8.ops._quantize_params import quantize_params as quantize_params
from jaxfp8.ops._ragged_dot import ragged_dot as ragged_dot
from jaxfp8.plan._kernels import Kernels as Kernels
from jaxfp8.recipes._recipe import Recipe as Recipe
from jaxfp8.sharding._shard import Shard as Shard
from jaxfp8.state._check_state import check_state as check_state
from jaxfp8.state._commit import commit as commit
from jaxfp8.state._commit import merge_seen as merge_seen
from jaxfp8.state._commit import nothing_seen as nothing_seen
from jaxfp8.state._commit import settle as settle
from jaxfp8.state._init import init_state as init_state
from jaxfp8.state._init import state_specs as state_specs
from jaxfp8.state._ledger import fork as fork
from jaxfp8.state._state import freeze as freeze
from jaxfp8.state._value_and_grad import value_and_grad as value_and_grad


def __dir__() -> list[str]:
    """The public names. Importing also binds internal folders, and `plugs`. They are left out."""
    inner = {"jaxprs", "kernels", "matmul", "numerics", "ops", "plugs"}
    return sorted(name for name in globals() if not name.startswith("_") and name not in inner)
