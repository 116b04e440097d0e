"""Optimizers for low-precision weights: the optimizer holds the master weights."""

from jaxfp8.optim._init import init_master_weights as init_master_weights
from jaxfp8.optim._init import master_weights as master_weights
from jaxfp8.optim._master_weights import MasterWeightsState as MasterWeightsState
from jaxfp8.optim._master_weights import with_master_weights as with_master_weights
from jaxfp8.optim._masters import BFloat16Plus as BFloat16Plus
from jaxfp8.optim._masters import Float16 as Float16
from jaxfp8.optim._masters import Float32 as Float32
from jaxfp8.optim._overwrite import Overwrite as Overwrite
