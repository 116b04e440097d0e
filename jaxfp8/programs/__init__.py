"""Checks of programs that XLA compiled.

They say which matmuls run in FP8, what devices send, and how long a TPU is estimated to take. They
also run a GPU program on a CPU.
"""

from jaxfp8.programs._fp8_gemms import assert_fp8_gemms as assert_fp8_gemms
from jaxfp8.programs._tpu_cycles import CyclesReport as CyclesReport
from jaxfp8.programs._tpu_cycles import CyclesRow as CyclesRow
from jaxfp8.programs._tpu_cycles import tpu_cycles as tpu_cycles
from jaxfp8.programs._transfers import Transfer as Transfer
from jaxfp8.programs._wire_report import WireReport as WireReport
from jaxfp8.programs._wire_report import assert_wire_dtype as assert_wire_dtype
from jaxfp8.programs._wire_report import wire_report as wire_report
from jaxfp8.programs.on_cpu._run import run_on_cpu as run_on_cpu
