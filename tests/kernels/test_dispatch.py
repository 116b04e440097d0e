import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from jax.sharding import AbstractDevice, AbstractMesh

import jaxfp8 as fp8
from jaxfp8.kernels import _dispatch
from jaxfp8.kernels._dispatch import (
    CHIPS,
    Backend,
    chip_named,
    compute_capability_of,
    dispatch,
)


def cannot(*args, **kwargs):
    raise NotImplementedError("needs a Hopper")


def broken(*args, **kwargs):
    raise RuntimeError("a bug")


def cuda(*arrays, cuda, default):
    """`lax.platform_dependent` on a GPU."""
    del default
    return cuda(*arrays)


def test_the_first_that_can():
    backends = {"c": broken, "b": lambda x, *, y: x + y, "a": cannot}
    assert dispatch("op", backends, iter(["a", "b", "c"]), 1, y=2) == 3


def test_extra_arguments_of_one_attempt():
    backends = {"a": cannot, "b": lambda x, *, y, tiling=None: (x, y, tiling)}
    assert dispatch("op", backends, [("a", {"tiling": 7}), ("b", {"tiling": 8})], 1, y=2) == (
        1, 2, 8
    )  # fmt: skip
    assert dispatch("op", backends, [("a", {"tiling": 7}), "b"], 1, y=2) == (1, 2, None)


def test_a_single_name_is_the_only_one_tried():
    backends = {"a": lambda: "a", "b": lambda: "b", "c": cannot}
    assert dispatch("op", backends, ("b",)) == "b"
    with pytest.raises(NotImplementedError, match="needs a Hopper"):
        dispatch("op", backends, ("c",))


def test_none_can():
    with pytest.raises(ExceptionGroup, match="no backend of op") as caught:
        dispatch("op", {"a": cannot, "b": cannot}, ("a", "b"))
    assert [str(reason) for reason in caught.value.exceptions] == [
        "a: needs a Hopper",
        "b: needs a Hopper",
    ]


def test_a_bug_is_not_a_reason_to_try_the_next():
    with pytest.raises(RuntimeError, match="a bug"):
        dispatch("op", {"a": broken, "b": lambda: 1}, ("a", "b"))


def test_an_unknown_name():
    backends = {"b": lambda: 1, "a": cannot}
    mentioned = mentions("no backend 'triton' of op", "only ['a', 'b']")
    with pytest.raises(NotImplementedError, match=mentioned):
        dispatch("op", backends, ("triton",))
    assert dispatch("op", backends, ("triton", "b")) == 1  # timings of another version have some


def test_a_backend_is_imported_by_its_first_call(tmp_path, monkeypatch):
    (tmp_path / "waiting_backend.py").write_text("def double(x, *, plus):\n  return 2 * x + plus\n")
    monkeypatch.syspath_prepend(tmp_path)
    elsewhere = lambda like, x, *, plus: -(2 * x + plus)
    backend = Backend("waiting_backend", "double", platform="cuda", elsewhere=elsewhere)
    assert "waiting_backend" not in sys.modules
    assert dispatch("op", {"a": backend}, ("a",), jnp.int32(3), plus=1) == -7  # on a CPU
    monkeypatch.setattr(_dispatch, "platform_dependent", cuda)
    _dispatch.traced_once.clear_cache()  # it has the trace for a CPU
    assert dispatch("op", {"a": backend}, ("a",), jnp.int32(3), plus=1) == 7
    del sys.modules["waiting_backend"]


@pytest.mark.parametrize(
    "source",
    ["import nothing_of_this_name", "from math import nothing", "raise ImportError('no ptxas')"],
)
def test_a_backend_that_cannot_be_imported_cannot_do_the_case(tmp_path, monkeypatch, source):
    (tmp_path / "lacking_backend.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    backend = Backend("lacking_backend", "f", needs="Triton (pip install it)")
    with pytest.raises(
        NotImplementedError, match=mentions("Triton (pip install it) cannot be imported: ")
    ):
        dispatch("op", {"a": backend, "b": lambda: 1}, ("a",))
    assert dispatch("op", {"a": backend, "b": lambda: 1}, ("a", "b")) == 1


@pytest.mark.parametrize("source", ["import jaxfp8.nothing", "from jaxfp8._typing import Nothing"])
def test_a_wrong_import_of_our_own_is_a_bug(tmp_path, monkeypatch, source):
    (tmp_path / "wrong_backend.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    backend = Backend("wrong_backend", "f", needs="Pallas")
    with pytest.raises(ImportError, match=r"(?i)nothing"):
        dispatch("op", {"a": backend, "b": lambda: 1}, ("a", "b"))


@pytest.mark.parametrize("name", CHIPS)
def test_chips(name):
    assert chip_named(name).name == name


def test_compute_capability_of_a_mesh():
    for kind, version in (("NVIDIA H100 80GB HBM3", 90), ("NVIDIA L40S", 89), ("cpu", None)):
        device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
        assert compute_capability_of(AbstractMesh((), (), abstract_device=device)) == version
    assert compute_capability_of(AbstractMesh((), ())) is None


def test_an_unknown_chip():
    with pytest.raises(ValueError, match=mentions("chip='h300'", "'h200'")):
        chip_named("h300")


PER_TENSOR = fp8.PerTensor()


def tensor(*shape, format=fp8.E4M3, granularity=PER_TENSOR):
    scale = jnp.ones(granularity.scale_shape(shape))
    return fp8.QuantizedTensor(
        jnp.ones(shape, format.dtype), scale, granularity, jnp.dtype("float32")
    )


T = tensor(2, 2)
WRONG_SCALE = fp8.QuantizedTensor(T.values, jnp.ones(2), T.granularity, T.dtype)
ROWS, COLUMNS = tensor(2, 2, granularity=fp8.PerAxis(0)), tensor(2, 2, granularity=fp8.PerAxis(1))


@pytest.mark.parametrize(
    ("error", "operands", "options", "parts"),
    [
        (TypeError, (jnp.ones((2, 2)), T), {}, ("lhs", "ArrayImpl", "make one with fp8.quantize")),
        (TypeError, (T, np.ones((2, 2))), {}, ("rhs", "ndarray", "make one with fp8.quantize")),
        (
            ValueError,
            (WRONG_SCALE, T),
            {},
            ("lhs has a scale float32[2]", "need float32[]", "make it with fp8.quantize"),
        ),
        (
            ValueError,
            (T, WRONG_SCALE),
            {},
            ("rhs has a scale float32[2]", "need float32[]", "make it with fp8.quantize"),
        ),
        (
            ValueError,
            (tensor(2, 2, format=fp8.E5M2),) * 2,
            {},
            ("lhs and rhs", "E5M2", "quantize one of them to E4M3"),
        ),
        (
            ValueError,
            (COLUMNS, T),
            {},
            (
                "lhs",
                "PerAxis(1)",
                "contracted axes (1,)",
                "Quantize it along the axes that are kept",
            ),
        ),
        (
            ValueError,
            (T, ROWS),
            {},
            (
                "rhs",
                "PerAxis(0)",
                "contracted axes (0,)",
                "Quantize it along the axes that are kept",
            ),
        ),
        (
            TypeError,
            (T, T),
            {"kernels": "mosaic"},
            (
                "kernels='mosaic' is of type str",
                "Kernels are needed",
                "Write kernels=fp8.Kernels(",
            ),
        ),
        (
            TypeError,
            (T, T),
            {"chop": "h200"},
            ("scaled_matmul() got an unexpected keyword argument 'chop'",),
        ),
        (
            TypeError,
            (T, T),
            {"chip": "h200"},
            ("scaled_matmul() got an unexpected keyword argument 'chip'",),
        ),
        (
            TypeError,
            (T, T),
            {"fast_accumulation": "no"},
            ("fast_accumulation='no'", "True or False"),
        ),
    ],
    ids=[
        "array lhs",
        "array rhs",
        "scale of lhs",
        "scale of rhs",
        "E5M2",
        "contracted lhs",
        "contracted rhs",
        "kernels",
        "option",
        "chip",
        "fast accumulation",
    ],
)
def test_misuse_of_scaled_matmul(error, operands, options, parts):
    with pytest.raises(error, match=mentions(*parts)):
        fp8.scaled_matmul(*operands, **options)


def test_a_scale_along_a_contracted_axis_of_size_one_may_leave_the_sum():
    np.testing.assert_array_equal(
        fp8.scaled_matmul(tensor(2, 1, granularity=fp8.PerAxis(1)), tensor(1, 2)), np.ones((2, 2))
    )


def test_what_is_not_taken_is_logged_once(caplog):
    """Choices by shape do not know every case of a layer."""
    backends = {"a": cannot, "b": lambda: 1}
    for _ in range(2):
        assert dispatch("an op that is logged", backends, ["a", "b"]) == 1
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jaxfp8", "WARNING")
    assert "an op that is logged: a cannot do a case" in record.message
    assert "needs a Hopper" in record.message
    with pytest.raises(NotImplementedError):  # which says it itself
        dispatch("another op", backends, ["a"])
    assert len(caplog.records) == 1
