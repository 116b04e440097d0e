"""Exact functions stay exact in every context in which XLA for GPUs may rewrite them."""

import jax
import pytest
from rewrites import CONTEXTS, faults

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.__name__)
def test_exact(context, gpu):
    with jax.default_device(gpu):
        # XLA for GPUs may fold a conversion to FP8. So only CPUs and kernels convert.
        assert not faults(context, without=["converted cast", "kernel cast"])
