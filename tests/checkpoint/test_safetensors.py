"""Safetensors files: the bytes that are written, what is read, and in how much memory."""

import json
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu

from jaxfp8.checkpoint import _safetensors
from jaxfp8.checkpoint._folder import INDEX, SINGLE, Checkpoint, read_index
from jaxfp8.checkpoint._safetensors import CheckpointError, Reader, TensorSpec, Writer

DTYPES = [
    *map(np.dtype, (bool, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, bfloat16)),
    *map(np.dtype, ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]),
]
ODD_NAME = 'é"\\\n\x01\x08\x0c\x7f\u2028/😀'
# Written by safetensors 0.8.0 from the tensors of `golden_tensors`:
# print(safetensors.numpy.save(golden_tensors(), metadata={"format": ODD_NAME})). The data follows.
GOLDEN_HEADER = (
    '{"__metadata__":{"format":"\xe9\\"\\\\\\n\\u0001\\b\\f\x7f\u2028/\U0001f600"},'
    '"i":{"dtype":"U64","shape":[2],"data_offsets":[0,16]},'
    '"e":{"dtype":"I64","shape":[2],"data_offsets":[16,32]},'
    '"b":{"dtype":"F64","shape":[2],"data_offsets":[32,48]},'
    '"":{"dtype":"F32","shape":[0,3],"data_offsets":[48,48]},'
    '"10":{"dtype":"F32","shape":[0,3],"data_offsets":[48,48]},'
    '"2":{"dtype":"F32","shape":[0,3],"data_offsets":[48,48]},'
    '"c":{"dtype":"F32","shape":[2],"data_offsets":[48,56]},'
    '"z":{"dtype":"F32","shape":[0,3],"data_offsets":[56,56]},'
    '"\xe9":{"dtype":"F32","shape":[0,3],"data_offsets":[56,56]},'
    '"j":{"dtype":"U32","shape":[2],"data_offsets":[56,64]},'
    '"f":{"dtype":"I32","shape":[2],"data_offsets":[64,72]},'
    '"m":{"dtype":"BF16","shape":[2],"data_offsets":[72,76]},'
    '"d":{"dtype":"F16","shape":[2],"data_offsets":[76,80]},'
    '"k":{"dtype":"U16","shape":[2],"data_offsets":[80,84]},'
    '"g":{"dtype":"I16","shape":[2],"data_offsets":[84,88]},'
    '"n":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[88,90]},'
    '"p":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[90,92]},'
    '"o":{"dtype":"F8_E5M2","shape":[2],"data_offsets":[92,94]},'
    '"h":{"dtype":"I8","shape":[2],"data_offsets":[94,96]},'
    '"l":{"dtype":"U8","shape":[2],"data_offsets":[96,98]},'
    '"\xe9\\"\\\\\\n\\u0001\\b\\f\x7f\u2028/\U0001f600"'
    ':{"dtype":"U8","shape":[],"data_offsets":[98,99]},'
    '"q":{"dtype":"BOOL","shape":[2],"data_offsets":[99,101]}}      '
)


def golden_tensors():
    """A tensor of each dtype. Names are in the opposite order, so that they do not decide it."""
    names = "qponmlkjihgfedcb"
    tensors = {
        name: (np.arange(2 * dtype.itemsize, dtype=np.uint8) % 2).view(dtype)
        for name, dtype in zip(names, DTYPES, strict=True)
    }
    empty, scalar = np.zeros((0, 3), np.float32), np.full((), 7, np.uint8)
    return tensors | {ODD_NAME: scalar, "": empty, "é": empty, "z": empty, "2": empty, "10": empty}


def write(path, tensors, metadata=None, pieces=1):
    specs = {name: TensorSpec(values.dtype, values.shape) for name, values in tensors.items()}
    with Writer(path, specs, metadata or {}) as writer:
        for name, values in tensors.items():
            for piece in np.array_split(values, pieces) if values.ndim else [values]:
                writer.write(name, piece)


def same(left, right):
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def test_files_have_the_bytes_of_the_package(tmp_path):
    tensors = golden_tensors()
    write(tmp_path / "f", tensors, {"format": ODD_NAME}, pieces=2)
    raw = (tmp_path / "f").read_bytes()
    header = GOLDEN_HEADER.encode()
    assert raw[:8] == len(header).to_bytes(8, "little")
    assert raw[8 : 8 + len(header)].decode() == GOLDEN_HEADER
    order = [name for name in json.loads(GOLDEN_HEADER) if name != "__metadata__"]
    assert raw[8 + len(header) :] == b"".join(tensors[name].tobytes() for name in order)
    with Reader(tmp_path / "f") as reader:
        assert list(reader.specs) == order
        assert reader.metadata == {"format": ODD_NAME}
        assert all(same(reader.read(name), tensors[name]) for name in tensors)


def test_a_file_without_tensors(tmp_path):
    write(tmp_path / "f", {})
    assert (tmp_path / "f").read_bytes() == b"\x08" + bytes(7) + b"{}      "
    write(tmp_path / "g", {}, {"b": "1", "a": "2"})
    assert b'{"__metadata__":{"a":"2","b":"1"}}' in (tmp_path / "g").read_bytes()
    with Checkpoint(tmp_path / "f") as checkpoint:
        assert (checkpoint.specs, checkpoint.metadata) == ({}, {})


def test_a_header_is_padded_with_as_few_spaces_as_possible(tmp_path):
    for length in range(1, 10):
        write(tmp_path / f"{length}", {"n" * length: np.zeros(0, np.uint8)})
        raw = (tmp_path / f"{length}").read_bytes()
        assert len(raw) % 8 == 0
        assert len(raw) - len(raw.rstrip(b" ")) < 8


@given(data=st.data())
def test_tensors_come_back_by_rows(data, tmp_path_factory):
    names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda x: x != "__metadata__")
    shapes = st.lists(st.integers(0, 5), max_size=4)
    kinds = data.draw(st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes)))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    tensors = {
        name: (
            rng.integers(0, 2, shape).astype(bool)
            if dtype.kind == "b"
            else np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype)
        ).reshape(shape)
        for name, (dtype, shape) in kinds.items()
    }
    path = tmp_path_factory.mktemp("folder") / "model.safetensors"
    write(path, tensors, pieces=data.draw(st.integers(1, 4)))
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    with Reader(path) as reader:
        assert reader.specs.keys() == tensors.keys() == header.keys()
        for name, values in tensors.items():
            begin, end = header[name]["data_offsets"]
            assert raw[8 + length + begin : 8 + length + end] == values.tobytes()
            assert reader.specs[name] == (values.dtype, values.shape)
            assert reader.specs[name].nbytes == values.nbytes
            whole = reader.read(name)
            assert same(whole, values)
            assert whole.flags.writeable
            if values.ndim:
                start = data.draw(st.integers(0, len(values)))
                stop = data.draw(st.integers(start, len(values)))
                assert same(reader.read(name, start, stop), values[start:stop])
                assert same(reader.read(name, start), values[start:])


def test_tensors_are_written_in_any_order_and_from_any_layout(tmp_path):
    a, b = np.arange(12, dtype=np.int32).reshape(3, 4).T, np.arange(4.0)[::-2]
    specs = {"a": TensorSpec(a.dtype, a.shape), "b": TensorSpec(b.dtype, b.shape)}
    with Writer(tmp_path / "f", specs, {}) as writer:
        writer.write("a", a[:1])
        writer.write("b", b)
        writer.write("a", a[1:1])
        writer.write("a", a[1:])
        writer.close()
        writer.close()
    with Reader(tmp_path / "f") as reader:
        assert same(reader.read("a"), np.ascontiguousarray(a))
        assert same(reader.read("b"), np.ascontiguousarray(b))


@pytest.fixture
def big(tmp_path):
    """64 MiB of zeros that take no space on a disk."""
    header = b'{"x":{"dtype":"BOOL","shape":[1024,65536],"data_offsets":[0,67108864]}}'
    with open(tmp_path / "big", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**26)
    return tmp_path / "big"


def test_reading_rows_allocates_the_rows(big):
    tracemalloc.start()
    try:
        with Reader(big) as reader:
            assert tracemalloc.get_traced_memory()[1] < 2**17
            piece = reader.read("x", 100, 116)
            assert piece.nbytes == 2**20
            assert tracemalloc.get_traced_memory()[1] < 2**20 + 2**17
    finally:
        tracemalloc.stop()


def test_writing_rows_allocates_nothing(tmp_path):
    rows = np.ones((16, 2**16), np.uint8)
    tracemalloc.start()
    try:
        with Writer(tmp_path / "f", {"x": TensorSpec(rows.dtype, (64, 2**16))}, {}) as writer:
            for _ in range(4):
                writer.write("x", rows)
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_while_it_is_open(big):
    with Reader(big) as reader:
        os.truncate(big, 2**20)
        assert reader.read("x", 0, 8).shape == (8, 65536)
        with pytest.raises(CheckpointError, match=r"'x': the file ends at byte 1048576"):
            reader.read("x", 8, 24)


def test_a_call_that_reads_less_than_it_is_asked_for(big, monkeypatch):
    values = np.arange(100, dtype=np.uint8)
    write(big.parent / "f", {"x": values})

    class Slow:
        def __init__(file, inner):
            file.inner = inner

        def readinto(file, view):
            return file.inner.readinto(view[:7])

        def __getattr__(file, name):
            return getattr(file.inner, name)

    with Reader(big.parent / "f") as reader:
        monkeypatch.setattr(reader, "_file", Slow(reader._file))
        assert same(reader.read("x"), values)


X = np.ones((4, 2), np.float32)
SPECS = {"x": TensorSpec(X.dtype, X.shape), "scalar": TensorSpec(np.dtype(np.int8), ())}
WRITES = {
    "missing": ([("x", X[:3]), ("scalar", np.int8(1))], "3 of 4 rows of tensor 'x'"),
    "missing scalar": ([("x", X)], "0 of 1 rows of tensor 'scalar'"),
    "too many": ([("x", X[:3]), ("x", X[:2])], "Before them 3 rows"),
    "twice": ([("scalar", np.zeros((), np.int8))] * 2, "Before them 1 rows"),
    "dtype": ([("x", X.astype(np.int32))], "dtype int32"),
    "byte order": ([("x", X.astype(">f4"))], "dtype >f4"),
    "shape of a row": ([("x", X[:, :1])], r"shape \(4, 1\)"),
    "no rows": ([("x", X[0])], r"shape \(2,\)"),
    "rows of a scalar": ([("scalar", np.zeros(1, np.int8))], r"shape \(1,\)"),
    "name": ([("y", X)], "has no tensor 'y'. It has .'x', 'scalar'"),
}


@pytest.mark.parametrize(("calls", "message"), WRITES.values(), ids=WRITES)
def test_half_a_file_is_removed(calls, message, tmp_path):
    with (  # noqa: PT012
        pytest.raises(CheckpointError, match=message),
        Writer(tmp_path / "f", SPECS, {}) as writer,
    ):
        for name, rows in calls:
            writer.write(name, np.asarray(rows))
    assert not os.listdir(tmp_path)


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "f", {"x": X})
    assert not os.listdir(tmp_path)


def spec_of(dtype, *shape):
    return {"x": TensorSpec(np.dtype(dtype), shape)}


REFUSED = {
    "complex": (spec_of("c8", 2), {}, "cannot write dtype complex64"),
    "byte order": (spec_of(">f4", 2), {}, "cannot write dtype >f4"),
    "negative": (spec_of("f4", -1), {}, r"shape=\(-1,\)"),
    "float": (spec_of("f4", 1.0), {}, r"shape=\(1.0,\)"),
    "too large": (spec_of("f4", 0, 2**62), {}, "shape="),
    "metadata as a name": ({"__metadata__": SPECS["x"]}, {}, "is no name of a tensor"),
    "number as a name": ({1: SPECS["x"]}, {}, "must be texts"),
    "number in metadata": (SPECS, {"a": 1}, "must be texts"),
    "surrogate": ({"\ud800": SPECS["x"]}, {}, "is not Unicode"),
    "surrogate in metadata": (SPECS, {"a": "\udc00"}, "is not Unicode"),
}


@pytest.mark.parametrize(("specs", "metadata", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written(specs, metadata, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        Writer(tmp_path / "f", specs, metadata)
    assert not os.listdir(tmp_path)


def test_a_header_that_nobody_reads_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(_safetensors, "MOST_JSON_BYTES", 100)
    write(tmp_path / "f", {"n" * 32: X})
    assert (tmp_path / "f").read_bytes()[0] <= 100
    Reader(tmp_path / "f").close()
    with pytest.raises(CheckpointError, match="several files"):
        write(tmp_path / "g", {"n" * 60: X})
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_is_not_overwritten(tmp_path):
    (tmp_path / "f").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "f", {"x": X})
    assert (tmp_path / "f").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("name", "rows"), [("x", (-1, 2)), ("x", (3, 2)), ("x", (0, 5)), ("scalar", (0, 1))]
)
def test_rows_that_a_tensor_does_not_have(name, rows, tmp_path):
    write(tmp_path / "f", {"x": X, "scalar": np.zeros((), np.int8)})
    with Reader(tmp_path / "f") as reader, pytest.raises(ValueError, match=f"tensor '{name}'"):
        reader.read(name, *rows)


def folder(path, files, weight_map=None):
    """A folder of Hugging Face: {file: {tensor: values}}, and its index."""
    path.mkdir()
    for file, tensors in files.items():
        write(path / file, tensors, {"format": "pt", "file": file})
    if weight_map is not None:
        (path / INDEX).write_text(json.dumps({"metadata": {"size": 1.5}, "weight_map": weight_map}))
    return path


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Y = np.arange(3.0)
GOOD = {
    "one file": ({SINGLE: {"x": X, "y": Y}}, None, ""),
    "its path": ({SINGLE: {"x": X, "y": Y}, "other.safetensors": {}}, None, SINGLE),
    "another name": ({"weights.safetensors": {"x": X, "y": Y}}, None, ""),
    "two files": ({A: {"x": X}, B: {"y": Y}}, {"x": A, "y": B}, ""),
    "the path of the index": ({A: {"x": X}, B: {"y": Y}}, {"x": A, "y": B}, INDEX),
    "a file beside the index": ({A: {"x": X, "y": Y}, B: {"z": Y}}, {"x": A, "y": A}, ""),
}


@pytest.mark.parametrize(("files", "weight_map", "name"), GOOD.values(), ids=GOOD)
def test_folders(files, weight_map, name, tmp_path):
    path = folder(tmp_path / "folder", files, weight_map)
    with Checkpoint(path / name) as checkpoint:
        assert checkpoint.specs == {"x": (X.dtype, X.shape), "y": (Y.dtype, Y.shape)}
        assert same(checkpoint.read("x"), X)
        assert same(checkpoint.read("y", 1, 2), Y[1:2])
        assert checkpoint.metadata["format"] == "pt"
        assert ("file" in checkpoint.metadata) == (
            weight_map is None or B not in weight_map.values()
        )
        with pytest.raises(CheckpointError, match="has no tensor 'z'"):
            checkpoint.read("z")
    with pytest.raises(ValueError, match="closed file"):
        checkpoint.read("x")


BAD = {
    "nothing": ({}, None, r"It holds \[\]. Give the path"),
    "two": ({"a.safetensors": {}, "b.safetensors": {}}, None, "'a.safetensors', 'b.safetensors'"),
    "both": ({SINGLE: {"x": X}, A: {"x": X}}, {"x": A}, f"'{SINGLE}', '{INDEX}'"),
    "no such file": ({A: {"x": X}}, {"x": A, "y": B}, f"'{B}', which cannot be opened: No such"),
    "not there": ({A: {"x": X}, B: {}}, {"x": A, "y": B}, f"'y'. The file '{B}' does not have it"),
    "not named": ({A: {"x": X, "y": Y}}, {"x": A}, f"not name it: tensor 'y'. The file '{A}' has"),
    "in both": ({A: {"x": X}, B: {"x": X, "y": Y}}, {"x": A, "y": B}, f"into '{A}': tensor 'x'. T"),
    "exchanged": ({A: {"x": X}, B: {"y": Y}}, {"x": B, "y": A}, "tensor 'x'"),
    "a long name": ({}, {"x": "a" * 300 + ".safetensors"}, "cannot be opened: File name too long"),
}


@pytest.mark.parametrize(("files", "weight_map", "message"), BAD.values(), ids=BAD)
def test_folders_that_do_not_fit(files, weight_map, message, tmp_path):
    path = folder(tmp_path / "folder", files, weight_map)
    before = sorted(os.listdir(path))
    with pytest.raises(CheckpointError, match=message) as raised:
        Checkpoint(path)
    assert str(path) in str(raised.value)
    assert sorted(os.listdir(path)) == before


def test_an_index_alone(tmp_path):
    folder(tmp_path / "folder", {}, {"x": A, "é": B})
    assert read_index(tmp_path / "folder" / INDEX) == {"x": A, "é": B}
    folder(tmp_path / "empty", {}, {})
    with Checkpoint(tmp_path / "empty") as checkpoint:
        assert (checkpoint.specs, checkpoint.metadata) == ({}, {})
