"""Programs that XLA compiled: running one made for a GPU on a CPU."""

from jaxfp8.programs._run_on_cpu import run_on_cpu as run_on_cpu
