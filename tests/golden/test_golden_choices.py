"""The kernels that run, and the estimates that choose them, are those of choices.json."""

import re

import pytest
from choices import CHIPS, FILE, KINDS, TABLE, TRACES_KERNELS, differences, kind, read

import jaxfp8 as fp8

GOLDEN = read(FILE)
TRACED = pytest.mark.skipif(not TRACES_KERNELS, reason="the kernels need jax 0.11")


@pytest.mark.parametrize(
    "which", [pytest.param(each, marks=[TRACED] * (each == "choices")) for each in KINDS]
)
def test_choices(which):
    groups = [name for name in dict.fromkeys((*GOLDEN, *TABLE)) if kind(name) == which]
    lines = [
        line
        for name in groups
        for line in differences(name, GOLDEN.get(name, {}), TABLE.get(name, dict)())
    ]
    if lines:
        shown = "\n".join(lines[:12] + [f"and {len(lines) - 12} more"] * (len(lines) > 12))
        pytest.fail(
            f"{len(lines)} answers of {which!r} are not those of {FILE.name}:\n{shown}\n"
            "Another kernel has other bits on a GPU; find the cause. If the choice is meant to "
            "change, say so in CHANGELOG.md and remake the file: python tests/golden/choices.py "
            "--write",
            pytrace=False,
        )


def test_every_kind_of_kernel_is_chosen():
    """A file of XLA's answers alone would guard nothing."""
    answers = " ".join(answer for group in GOLDEN.values() for answer in group.values())
    for name in ("mosaic then xla", "cudnn then xla", "xla: ", "mosaic: ", "cudnn: "):
        assert name in answers


def test_every_chip_is_asked():
    with pytest.raises(ValueError, match="chip='' is unknown") as raised:
        fp8.Kernels("")
    assert set(re.findall(r"'(\w+)'", str(raised.value))) == set(filter(None, CHIPS))
