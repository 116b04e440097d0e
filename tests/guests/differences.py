"""Where our layers differ from flax's on purpose.

The tests of flax's that must fail, with which error and why.

Each test that is listed here must fail. Every other test must pass.
"""

from typing import NamedTuple


class Difference(NamedTuple):
    reason: str
    error: str  # some words of it: the test must fail for this and nothing else
    tests: tuple[str, ...]


OWN_MATMUL = (
    "The recipe is the layer's matmul. A second one beside it is an error that names flax's layer "
    "as the cure."
)
WORDING = (
    "The same equations are refused, with a ValueError. The words are ours: what was given, what "
    "is needed."
)

DIFFERENCES = {
    "linen layers": (
        Difference(
            WORDING,
            '" does not match "',
            tuple(f"LinearTest::test_einsum_error{i}" for i in range(3)),
        ),
    ),
    "nnx layers": (
        Difference(OWN_MATMUL, "Drop einsum_op=", ("TestLinenConsistency::test_einsum_op",)),
    ),
    "linen layers as nnx's": (
        # preferred_element_type=float32, which flax's own Dense gets through dot_general=
        Difference(
            OWN_MATMUL,
            "Drop dot_general=",
            tuple(f"TestLinenConsistency::test_nnx_linear_equivalence{i}" for i in range(1, 48, 2)),
        ),
    ),
}
DIFFERENCES["converted linen layers"] = DIFFERENCES["linen layers"]
