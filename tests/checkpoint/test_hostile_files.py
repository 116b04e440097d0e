"""Files from strangers: each is read as its bytes say, or is one error, in no time and memory."""

import os
import re
import signal
import struct
import tracemalloc

import pytest
from hostile_headers import DEEP, T, file_of, one, truth

from jaxfp8.checkpoint._folder import Checkpoint, read_index
from jaxfp8.checkpoint._safetensors import CheckpointError, Reader

# (the file, a part of the error)
HOSTILE = {
    "empty file": (b"", "0 bytes"),
    "seven bytes": (bytes(7), "7 bytes"),
    "no header": (bytes(8), "Expecting value"),
    "truncated header": (file_of(one(), b"")[:-2], "the header has 53 bytes"),
    "truncated data": (file_of(one(offsets="[0,4]", shape="[4]"), b"123"), "by its header 65"),
    "bytes after the data": (file_of(one(), b"12"), "has 63 bytes, and by its header 62"),
    "a header of gigabytes": (file_of("{}", length=2**33), "8589934592 bytes"),
    "a header of 2^64 bytes": (file_of("{}", length=2**64 - 1), "18446744073709551615"),
    "not JSON": (file_of("{a:1}"), "Expecting property name"),
    "not UTF-8": (file_of(b'{"\xff":1}'), "can't decode byte 0xff"),
    "UTF-16": (file_of("{}".encode("utf-16")), "can't decode"),
    "a byte order mark": (file_of("\ufeff{}"), "BOM"),
    "a zero byte at the end": (file_of(one() + "\0", b"1"), "Extra data"),
    "two objects": (file_of("{}{}"), "Extra data"),
    "a list": (file_of("[]"), "must be an object"),
    "nested lists": (file_of(DEEP), "nested too deeply"),
    "nested dicts": (file_of('{"a":' * 100_000), "nested too deeply"),
    "nested in a field": (file_of(one(more=f',"b":{DEEP}')), "nested too deeply"),
    "many digits": (file_of(one(shape=f"[{'9' * 10_000}]"), b"1"), "must be a whole one"),
    "many small digits": (file_of(one(shape=f"[{'0' * 10_000}]"), b"1"), "Expecting"),
    "2^64": (file_of(one(shape=f"[{2**64}]"), b"1"), "'18446744073709551616' must be"),
    "NaN": (file_of(one(shape="[NaN]"), b"1"), "'NaN' must be a whole one"),
    "Infinity": (file_of(one(offsets="[0,Infinity]"), b"1"), "'Infinity' must be"),
    "-Infinity": (file_of(one(more=',"b":-Infinity'), b"1"), "'-Infinity' must be"),
    "a float": (file_of(one(shape="[1.0]"), b"1"), "'1.0' must be a whole one"),
    "an exponent": (file_of(one(shape="[1e0]"), b"1"), "'1e0' must be a whole one"),
    "minus zero": (file_of(one(offsets="[-0,1]"), b"1"), "'-0' must be"),
    "a negative size": (file_of(one(shape="[-1]"), b"1"), "'-1' must be"),
    "two negative sizes": (file_of(one(shape="[-1,-1]"), b"1"), "'-1' must be"),
    "a leading zero": (file_of(one(shape="[01]"), b"1"), "Expecting"),
    "a name twice": (file_of(f'{{"a":{T},"a":{T}}}', b"1"), "the key 'a' is there twice"),
    "a field twice": (file_of(one(more=',"dtype":"U8"'), b"1"), "'dtype' is there twice"),
    "metadata twice": (file_of('{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' is th"),
    "its key twice": (file_of('{"__metadata__":{"k":"1","k":"1"}}'), "'k' is there twice"),
    "metadata a list": (file_of('{"__metadata__":[]}'), r"__metadata__=[] must be a dict"),
    "metadata null": (file_of('{"__metadata__":null}'), "__metadata__=None must be"),
    "a number in metadata": (file_of('{"__metadata__":{"a":1}}'), "{'a': 1} must be"),
    "a tensor in metadata": (file_of(one(name='"__metadata__"'), b"1"), "must be a dict of te"),
    "an unknown field": (file_of(one(more=',"strides":[1]'), b"1"), "and nothing else"),
    "no offsets": (file_of('{"a":{"dtype":"U8","shape":[1]}}', b"1"), "must have dtype, shape"),
    "a tensor as a list": (file_of('{"a":["U8",[1],[0,1]]}', b"1"), "must have dtype, shape"),
    "a tensor null": (file_of('{"a":null}'), "tensor 'a': None must have"),
    "dtype unknown": (file_of(one('"u8"'), b"1"), "cannot read dtype 'u8'"),
    "dtype a number": (file_of(one("5"), b"1"), "cannot read dtype 5"),
    "dtype a list": (file_of(one("[]"), b"1"), "cannot read dtype []"),
    "dtype a dict": (file_of(one('{"U8":null}'), b"1"), "cannot read dtype {"),
    "shape a number": (file_of(one(shape="1"), b"1"), "shape=1 must be a list"),
    "shape a text": (file_of(one(shape='"1"'), b"1"), "shape='1' must be a list"),
    "shape null": (file_of(one(shape="null"), b"1"), "shape=None must be a list"),
    "a bool in a shape": (file_of(one(shape="[true]"), b"1"), "shape=[True] must be"),
    "a text in a shape": (file_of(one(shape='["1"]'), b"1"), "shape=['1'] must be"),
    "bools as offsets": (file_of(one(offsets="[false,true]"), b"1"), "data_offsets=[False, True]"),
    "offsets a dict": (file_of(one(offsets='{"0":1}'), b"1"), "data_offsets={'0': 1}"),
    "three offsets": (file_of(one(offsets="[0,1,2]"), b"1"), "data_offsets=[0, 1, 2] must be two"),
    "no offset": (file_of(one(offsets="[]"), b"1"), "data_offsets=[] must be two"),
    "offsets backwards": (file_of(one(offsets="[1,0]"), b"1"), "data_offsets=[1, 0]"),
    "too many bytes": (file_of(one(offsets="[0,2]"), b"12"), "span 1 bytes"),
    "a hole at the front": (file_of(one(offsets="[1,2]"), b"12"), "must begin at 0"),
    "a hole": (file_of(f'{{"b":{one(offsets="[2,3]")[5:-1]},"a":{T}}}', b"123"), "begin at 1"),
    "an overlap": (file_of(f'{{"b":{T},"a":{T}}}', b"1"), "must begin at 1"),
    "nothing inside of data": (
        file_of(
            one(shape="[0]", offsets="[1,1]")[:-1]
            + ","
            + one(shape="[2]", offsets="[0,2]", name='"b"')[1:],
            b"12",
        ),
        "must begin at 2",
    ),
    "2^32 by 2^32": (file_of(one(shape="[4294967296,4294967296]"), b"1"), "must have at most 64"),
    "2^64 elements as zero": (
        file_of(one(shape="[4294967296,4294967296]", offsets="[0,0]")), "must have at most 64"),
    "a terabyte": (file_of(one(shape="[1099511627776]", offsets="[0,1099511627776]")), "has 8"),
    "nothing in a large shape": (
        file_of(one(shape="[0,9223372036854775807,4]", offsets="[0,0]")), "at most 92233720368547"),
    "65 axes": (file_of(one(shape=f"[{'1,' * 64}1]"), b"1"), "at most 64 axes"),
    "a million axes": (
        file_of(one(shape=f"[{'9999999999999999999,' * 999_999}1]"), b"1"), "at most 64 axes"),
    "half a surrogate pair": (file_of(one(name='"\\ud800"'), b"1"), "surrogates not allowed"),
    "the other half": (file_of('{"__metadata__":{"a":"\\udc00"}}'), "surrogates not allowed"),
    "a control character": (file_of(one(name='"\x01"'), b"1"), "Invalid control character"),
    "a name of a megabyte": (file_of(one(name=f'"{"n" * 2**20}"', shape="[2]"), b"1"), "nnn...nnn"),
} | {
    f"dtype {code}": (file_of(one(f'"{code}"', "[8]", f"[0,{bits}]"), bytes(bits)), "cannot read d")
    for code, bits in {
        "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64
    }.items()
}  # fmt: skip


@pytest.mark.parametrize(("raw", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(raw, message, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        Reader(path)
    text = str(raised.value)
    assert text.startswith(f"{path}: ")
    assert text.endswith("with the program that wrote it.")
    assert text.count(str(path)) == 1
    assert len(text) < 800
    assert os.listdir(tmp_path) == ["f"]
    assert truth(raw) is None


def test_a_lie_allocates_nothing(tmp_path):
    header = one(shape=f"[{2**40}]", offsets=f"[0,{2**40}]")
    for length in (2**40, 99_999_999, None):
        (tmp_path / "f").write_bytes(file_of(header, b"123", length))
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError):
                Reader(tmp_path / "f")
            assert tracemalloc.get_traced_memory()[1] < 2**17
        finally:
            tracemalloc.stop()


def test_large_headers_are_not_read(tmp_path):
    for read, length in ((Reader, 100_000_001), (read_index, 0)):
        with open(tmp_path / "f", "wb") as file:
            file.write(struct.pack("<Q", length))
            file.truncate(2**33)
        with pytest.raises(CheckpointError, match="at most 100000000"):
            read(tmp_path / "f")


def test_a_bool_is_one_of_two_bytes(tmp_path):
    (tmp_path / "f").write_bytes(file_of(one('"BOOL"', "[3]", "[0,3]"), b"\0\1\2"))
    with Reader(tmp_path / "f") as reader:
        assert reader.read("a", 0, 2).tolist() == [False, True]
        with pytest.raises(
            CheckpointError, match=r"'a': dtype BOOL has the bytes 0 and 1, and .* 2"
        ):
            reader.read("a")


@pytest.fixture
def impatience():
    """After five seconds a test that waits for a pipe fails."""

    def fail(signal_number, frame):
        raise AssertionError("the test hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


ODD = {
    "folder": os.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: os.symlink("/dev/zero", path),
    "link to a folder": lambda path: os.symlink(os.path.dirname(path), path),
}


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("read", [Reader, read_index], ids=["file", "index"])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_no_file(make, read, tmp_path):
    make(tmp_path / "f")
    with pytest.raises(CheckpointError, match="a folder, a pipe or a device"):
        read(tmp_path / "f")


def test_links_to_files_are_read_and_others_say_so(tmp_path):
    (tmp_path / "f").write_bytes(file_of(one(), b"1"))
    os.symlink("f", tmp_path / "link.safetensors")
    os.symlink("loop", tmp_path / "loop")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("a").tolist() == [49]
    with pytest.raises(OSError, match="symbolic links"):
        Reader(tmp_path / "loop")
    with pytest.raises(FileNotFoundError):
        Checkpoint(tmp_path / "missing")


NAMES = {
    "folder": "a/b.safetensors",
    "parent": "../b.safetensors",
    "absolute": "/etc/b.safetensors",
    "of Windows": "..\\\\b.safetensors",
    "a drive": "c:b.safetensors",
    "zero byte": "b\\u0000.safetensors",
    "end of a line": "b\\n.safetensors",
    "another kind": "b.bin",
    "nothing": "",
}
INDICES = {
    "no weight_map": ("{}", "weight_map=None"),
    "a list": ('{"weight_map":["a"]}', "weight_map=['a']"),
    "no object": ("3", "must be an object"),
    "nothing": ("", "Expecting value"),
    "not JSON": ('{"weight_map":{"a":"b.safetensors"}', "Expecting ',' delimiter"),
    "nested": (f'{{"metadata":{DEEP}', "nested too deeply"),
    "NaN": ('{"weight_map":NaN}', "weight_map=nan"),
    "a name twice": ('{"weight_map":{"a":"b.safetensors","a":"c.safetensors"}}', "is there twice"),
    "a map twice": ('{"weight_map":{},"weight_map":{}}', "is there twice"),
    "a number": ('{"weight_map":{"a":3}}', "tensor 'a' into 3"),
    "null": ('{"weight_map":{"a":null}}', "tensor 'a' into None"),
    "surrogate": ('{"weight_map":{"\\ud800":"b.safetensors"}}', "surrogates not allowed"),
} | {key: (f'{{"weight_map":{{"a":"{name}"}}}}', "tensor 'a' into") for key, name in NAMES.items()}


@pytest.mark.parametrize(("text", "message"), INDICES.values(), ids=INDICES)
def test_hostile_indices(text, message, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    for read in (read_index, Checkpoint):
        with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
            read(path)
        assert str(raised.value).startswith(str(path))


def test_an_index_may_have_any_metadata(tmp_path):
    text = f'{{"metadata":{{"a":-1.5e3,"b":{"9" * 5000},"c":[null,true]}},"weight_map":{{}},"d":1}}'
    (tmp_path / "f").write_text(text)
    assert read_index(tmp_path / "f") == {}
