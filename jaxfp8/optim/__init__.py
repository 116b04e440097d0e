"""Optimizers with master weights, with moments in few bytes, and inside of the backward pass."""

from jaxfp8.optim._check_state import check_state as check_state
from jaxfp8.optim._eight_bit_formats import FP8 as FP8
from jaxfp8.optim._eight_bit_formats import ExpandedFP8 as ExpandedFP8
from jaxfp8.optim._eight_bit_formats import Int8 as Int8
from jaxfp8.optim._fused_adamw import fused_adamw as fused_adamw
from jaxfp8.optim._master_weights import MasterWeightsState as MasterWeightsState
from jaxfp8.optim._master_weights import init_master_weights as init_master_weights
from jaxfp8.optim._master_weights import master_weights as master_weights
from jaxfp8.optim._master_weights import with_master_weights as with_master_weights
from jaxfp8.optim._masters import BFloat16Plus as BFloat16Plus
from jaxfp8.optim._masters import Float16 as Float16
from jaxfp8.optim._masters import Float32 as Float32
from jaxfp8.optim._moment_formats import BFloat16 as BFloat16
from jaxfp8.optim._moment_formats import PerParameter as PerParameter
from jaxfp8.optim._moments import MomentFormatsState as MomentFormatsState
from jaxfp8.optim._moments import with_moment_formats as with_moment_formats
from jaxfp8.optim._optimizers import adamw as adamw
from jaxfp8.optim._optimizers import scale_by_adam as scale_by_adam
from jaxfp8.optim._optimizers import scale_by_muon as scale_by_muon
from jaxfp8.optim._release import Release as Release
from jaxfp8.optim._release import release as release
from jaxfp8.optim._released import Released as Released
from jaxfp8.optim._weights import Overwrite as Overwrite
