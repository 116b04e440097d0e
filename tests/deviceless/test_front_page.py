"""README's fast path, word for word, compiles to FP8 matmuls on the GPUs that it names.

Without its options it raises.
"""

import jax
import pytest
from pages import marked
from targets import topology

import jaxfp8 as fp8

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("standard_promotion")]


def fences() -> tuple[str, str]:
    """The 15 lines, and the fast path that continues them."""
    return marked("train step, linen"), marked("the fast path")


def namespace_for(chip: str, lines: str) -> dict:
    """What the 15 lines leave behind, as arrays of a GPU that is not there."""
    namespace = {}
    exec(lines, namespace)
    device = jax.sharding.SingleDeviceSharding(topology(chip).devices[0])
    arrays = {name: namespace[name] for name in ("params", "state", "opt", "x", "y")}
    on_gpu = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
    return namespace | jax.tree.map(on_gpu, arrays)


@pytest.mark.parametrize("chip", ["h200", "h100", "b200"])
def test_fast_path(chip):
    lines, fast_path = fences()
    assert '"h200")  # or "h100", "b200"' in fast_path
    assert fast_path.splitlines()[-1] == "fp8.programs.assert_fp8_gemms(compiled)"
    namespace = namespace_for(chip, lines)
    exec(fast_path.replace('"h200"', repr(chip)), namespace)
    fp8.programs.assert_fp8_gemms(namespace["compiled"], 5)  # the first layer has no dgrad


def test_without_its_options_it_raises():
    lines, fast_path = fences()
    namespace = namespace_for("h200", lines)
    with pytest.raises(AssertionError, match=r"found 0 in FP8 and 5 in high precision"):
        exec(fast_path.replace(", compiler_options=options", ""), namespace)
