"""flax's own tests of dense layers and attention, with our layers in place of flax's.

Only flax's sdist contains its tests: `--flax-sdist` says where it is. Each of flax's files runs in
a pytest process of its own, under flax's configuration. Each run replaces the layers of linen or of
nnx, never both. So a test that compares linen with nnx compares our layers with flax's.
"""

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import flax
import pytest
from differences import DIFFERENCES
from quick_flags import quick_flags

HERE = Path(__file__).parent


class Guest(NamedTuple):
    face: str  # whose layers are ours
    file: str  # below tests/ in flax's sdist
    layers: tuple[str, ...]  # of ours: each must have been called
    selected: str = ""  # as in pytest's -k. What is left out calls no layer of ours
    converted: bool = False  # whether flax's layers are converted as fp8.convert does it


GUESTS = {
    "linen layers": Guest(
        "linen",
        "linen/linen_linear_test.py",
        ("FP8Dense", "FP8DenseGeneral", "FP8Einsum", "FP8DotGeneral"),
        "not conv and not embed and not int_kernel and not canonicalize_padding",
    ),
    "linen attention": Guest("linen", "linen/linen_attention_test.py", ("FP8DotGeneral",)),
    "nnx layers": Guest(
        "nnx",
        "nnx/nn/linear_test.py",
        ("FP8Linear", "FP8LinearGeneral", "FP8Einsum", "FP8DotGeneral"),
        "not PReLU",
    ),
    "nnx attention": Guest(
        "nnx",
        "nnx/nn/attention_test.py",
        ("FP8DotGeneral",),
        "not causal_mask and not gqa_shapes and not gqa_parity and not Validation and not RoPE or "
        "with_mha",
    ),
    "linen layers as nnx's": Guest(
        "linen",
        "nnx/nn/linear_test.py",
        ("FP8Dense", "FP8Einsum", "FP8DotGeneral"),
        "TestLinenConsistency and not einsum_op",
    ),
    "linen attention as nnx's": Guest(
        "linen", "nnx/nn/attention_test.py", ("FP8DotGeneral",), "TestLinenConsistency"
    ),
}
GUESTS |= {
    f"converted {name}": GUESTS[name]._replace(layers=("FP8DotGeneral",), converted=True)
    for name in ("linen layers", "linen attention", "nnx layers", "nnx attention")
}


@pytest.fixture(scope="session")
def flax_source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of flax's sdist, with its tests and their configuration."""
    sdist = request.config.getoption("--flax-sdist")
    release = f"flax-{flax.__version__}"
    cure = f"python -m pip download --no-deps --no-binary flax {release.replace('-', '==')}"
    if sdist is None:
        pytest.skip(f"needs flax's tests: {cure}; then --flax-sdist {release}.tar.gz")
    if not Path(sdist).is_file():
        raise ValueError(f"--flax-sdist={sdist} is no file; give flax's sdist: {cure}")
    folder = tmp_path_factory.mktemp("flax")
    with tarfile.open(sdist) as archive:
        wanted = [
            m
            for m in archive
            if m.name == f"{release}/pyproject.toml" or m.name.startswith(f"{release}/tests/")
        ]
        if not wanted:
            raise ValueError(
                f"--flax-sdist={sdist} holds no {release}; give that of the installed flax: {cure}"
            )
        archive.extractall(folder, wanted, filter="data")
    return folder / release


def run(guest: Guest, source: Path, report: Path) -> str:
    """Run flax's tests; what pytest wrote."""
    environment = os.environ | {
        # flax's tests/run_all_tests.sh does so. Dtypes promote as jax has it
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTEST_ADDOPTS": "",
        "XLA_FLAGS": quick_flags(),
    }
    finished = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "fp8_in_flax",
                "--face",
                guest.face,
                *(["--converted"] if guest.converted else []),
                "-k",
                guest.selected,
            ),
            *(
                "-c",
                "pyproject.toml",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "--junitxml",
                report,
            ),
            f"tests/{guest.file}",
        ],
        cwd=source,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert finished.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), (
        finished.stdout
    )
    return finished.stdout


@pytest.mark.parametrize("name", GUESTS)
def test_flax_s_tests_pass_with_our_layers(name, flax_source, tmp_path):
    guest = GUESTS[name]
    report = tmp_path / "report.xml"
    output = run(guest, flax_source, report)
    tests = list(ElementTree.parse(report).iter("testcase"))
    calls, failed = Counter(), {}
    listed = {test: d.error for d in DIFFERENCES.get(name, ()) for test in d.tests}
    for test in tests:
        calls.update({p.get("name"): int(p.get("value")) for p in test.iter("property")})
        for failure in (*test.iter("failure"), *test.iter("error")):
            test_id, error = (
                f"{test.get('classname').split('.')[-1]}::{test.get('name')}",
                failure.get("message"),
            )
            expected = listed.get(test_id)
            failed[test_id] = (
                expected if expected and expected in error else error.split("\n--------")[0]
            )
    ours = sum(test.find("properties") is not None for test in tests)
    print(f"{name}: {len(tests)} of flax's tests, {ours} call {dict(calls)}, {len(failed)} fail")
    assert failed == listed, (
        f"not the differences that are listed (left: what failed)\n{output[-8000:]}"
    )
    assert not set(guest.layers) - set(calls), "these layers of ours were never called"
