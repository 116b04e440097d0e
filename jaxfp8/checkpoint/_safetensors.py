"""Safetensors files, read and written in pieces: a tensor or some of its rows at a time.

A file is the length of its header (8 bytes, little endian), the header (JSON), and the data of all
tensors without gaps. The package `safetensors` takes all tensors at once to write them. By NumPy it
cannot read bfloat16 and FP8. So this file implements the format. A `Writer` writes the same bytes
as that package. A `Reader` accepts less: each file that it accepts, the package accepts, too.

Files come from strangers. A header is checked completely before a tensor is read. Memory is only
allocated for bytes that the file has. What is wrong is one `CheckpointError`.
"""

import collections
import contextlib
import io
import itertools
import json
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

Path: TypeAlias = str | os.PathLike[str]

MOST_JSON_BYTES = 100_000_000  # of a header, as in the package `safetensors`, and of other JSON

# In the order of the package's enumeration `Dtype`. A file has its last dtype first.
_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES.values())}
_FIELDS = ("dtype", "shape", "data_offsets")
_METADATA = "__metadata__"  # a key of the header that is no tensor
_MOST_AXES, _MOST_BYTES = 64, 2**63 - 1  # of an array in NumPy
_CURE = (
    "Copy or download the file again. If it is not damaged, convert it with the program that wrote "
    "it."
)

# A hostile name or value can be as long as a header.
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother = 120, 120
show = _SHORT.repr


class CheckpointError(ValueError):
    """A file of weights that is damaged, or does not fit."""


class TensorSpec(NamedTuple):
    """What a header says of a tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """The length of axis 0. A scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class Reader(contextlib.AbstractContextManager["Reader"]):
    """An open safetensors file. `read` returns its tensors. One thread may read at a time."""

    specs: dict[str, TensorSpec]  # in the order of the data
    metadata: dict[str, str]

    def __init__(self, path: Path) -> None:
        """Open a file and check its header. No tensor is read."""
        self.path = os.fspath(path)
        with contextlib.ExitStack() as opened, named(self.path):
            self._file = opened.enter_context(_open_regular(self.path))
            self._read_header(os.fstat(self._file.fileno()).st_size)
            opened.pop_all()

    def _read_header(self, size: int) -> None:
        if size < 8:
            raise ValueError(f"the file has {size} bytes, and must have at least 8")
        length = int.from_bytes(_fill(self._file, 0, bytearray(8)), "little")
        # Before memory is allocated for it.
        if length > min(size - 8, MOST_JSON_BYTES):
            raise ValueError(
                f"by its first 8 bytes the header has {length} bytes. The file has {size}, and a "
                f"header has at most {MOST_JSON_BYTES}"
            )
        header = _parse(_fill(self._file, 8, bytearray(length)), _natural)
        self.metadata = header.pop(_METADATA, {})
        if type(self.metadata) is not dict or any(
            type(value) is not str for value in self.metadata.values()
        ):
            raise ValueError(f"{_METADATA}={show(self.metadata)} must be a dict of texts")
        found = []
        for name, entry in header.items():
            with named(f"{self.path}: tensor {show(name)}"):
                found.append((*_read_entry(entry), name))
        found.sort(key=lambda each: each[:2])
        self.specs, self._begins, end = {}, {}, 0
        for begin, next_end, spec, name in found:
            if begin != end:
                raise ValueError(
                    f"data_offsets=[{begin}, {next_end}] of tensor {show(name)} must begin at "
                    f"{end}, where the data before it ends"
                )
            self.specs[name], self._begins[name], end = spec, 8 + length + begin, next_end
        if 8 + length + end != size:
            raise ValueError(f"the file has {size} bytes, and by its header {8 + length + end}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read the rows start:stop of axis 0, or the whole tensor, into memory of its own."""
        if name not in self.specs:
            raise lacks(self.path, name, self.specs)
        spec, shape = self.specs[name], self.specs[name].shape
        if shape or (start, stop) != (0, None):
            stop = spec.rows if stop is None else stop
            if not shape or not 0 <= start <= stop <= spec.rows:
                raise ValueError(
                    f"start={start!r} and stop={stop!r} must be rows of tensor {show(name)} in "
                    f"{self.path}, whose shape is {shape}."
                )
            shape = (stop - start, *shape[1:])
        values = np.empty(shape, spec.dtype)
        raw = values.reshape(-1).view(np.uint8)
        with named(f"{self.path}: tensor {show(name)}"):
            _fill(self._file, self._begins[name] + start * spec.row_bytes, raw.data)
            # NumPy computes nonsense with other bytes.
            if spec.dtype == np.bool_ and raw.max(initial=0) > 1:
                raise ValueError(f"dtype BOOL has the bytes 0 and 1, and here is {raw.max()}")
        return values

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


class Writer(contextlib.AbstractContextManager["Writer"]):
    """A new safetensors file, whose tensors are written in any order, each by its rows.

    The bytes are those of the package `safetensors`. It writes two keys of metadata or more in a
    random order, and here they are sorted. Without metadata the header has no `__metadata__`.
    """

    def __init__(
        self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        """Create a file that does not exist yet, with its header."""
        self.path = os.fspath(path)
        texts = [*specs, *metadata, *metadata.values()]
        if _METADATA in specs or any(type(text) is not str for text in texts):
            raise CheckpointError(
                f"{self.path}: the names of tensors and the metadata must be texts, and "
                f"{_METADATA} is no name of a tensor; got {show(texts)}."
            )
        for name, spec in specs.items():
            if spec.dtype not in _CODES:
                raise CheckpointError(
                    f"{self.path}: tensor {show(name)}: cannot write dtype {spec.dtype}, only "
                    f"{', '.join(map(str, _CODES))}. Cast it."
                )
            with named(f"{self.path}: tensor {show(name)}"):
                _check_shape(spec)
        header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
        self._specs, self._begins, end = dict(specs), {}, 0
        self._written = dict.fromkeys(specs, 0)  # rows
        for name in sorted(specs, key=lambda name: (-_RANKS[specs[name].dtype], name)):
            spec, begin, end = specs[name], end, end + specs[name].nbytes
            values = _CODES[spec.dtype], spec.shape, (begin, end)
            header[name] = dict(zip(_FIELDS, values, strict=True))
            self._begins[name] = begin
        raw = _encode(self.path, header)
        self._data = 8 + len(raw)
        self._file = open(self.path, "xb")  # noqa: SIM115
        try:
            self._file.write(len(raw).to_bytes(8, "little") + raw)
        except BaseException:
            self._remove()
            raise

    def write(self, name: str, rows: np.ndarray) -> None:
        """Write the next rows of a tensor: those after the rows that were written before."""
        if name not in self._specs:
            raise lacks(self.path, name, self._specs)
        spec, start = self._specs[name], self._written[name]
        stop = start + (len(rows) if rows.ndim else 1)
        fits = rows.ndim == len(spec.shape) and rows.shape[1:] == spec.shape[1:]
        if rows.dtype != spec.dtype or not fits or stop > spec.rows:
            raise CheckpointError(
                f"{self.path}: rows of dtype {rows.dtype} and shape {rows.shape} do not fit tensor "
                f"{show(name)} of dtype {spec.dtype} and shape {spec.shape}. Before them {start} "
                f"rows were written."
            )
        self._file.seek(self._data + self._begins[name] + start * spec.row_bytes)
        self._file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        self._written[name] = stop

    def close(self) -> None:
        """Finish the file. It is an error if rows are missing, and then the file is removed."""
        if self._file.closed:
            return
        try:
            for name, spec in self._specs.items():
                if self._written[name] < spec.rows and spec.nbytes:
                    raise CheckpointError(
                        f"{self.path}: {self._written[name]} of {spec.rows} rows of tensor "
                        f"{show(name)} were written. Write all of them before it is closed."
                    )
            self._file.flush()
            os.fsync(self._file.fileno())
        except BaseException:
            self._remove()
            raise
        self._file.close()

    def _remove(self) -> None:
        """Half a file has a correct header, so nobody may find one."""
        with contextlib.suppress(
            OSError
        ):  # it writes what is buffered, for instance to a full disk
            self._file.close()
        os.unlink(self.path)

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        elif not self._file.closed:
            self._remove()


def lacks(path: str, name: str, names: Iterable[str]) -> CheckpointError:
    return CheckpointError(f"{path} has no tensor {show(name)}. It has {show(list(names))}.")


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """What is wrong with a file is a ValueError inside, also in UTF-8 and JSON."""
    try:
        yield
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{where}: the JSON is nested too deeply. {_CURE}") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}. {_CURE}") from None


def _open_regular(path: str) -> io.FileIO:
    # Before it is opened: a pipe would wait for its other end, and a device may do anything.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("this is a folder, a pipe or a device, and must be a file")
    return open(path, "rb", buffering=0)


def _fill(file: io.FileIO, begin: int, out: Any) -> Any:
    """Fill `out` from a file, and return it. The system may read less at once than it is asked."""
    view, done = memoryview(out), 0
    file.seek(begin)
    while done < len(view):
        if not (count := file.readinto(view[done:])):
            raise ValueError(f"the file ends at byte {begin + done}. It was longer before")
        done += count
    return out


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file of a stranger, which may have inf and NaN."""
    path = os.fspath(path)
    with named(path), _open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_JSON_BYTES:
            raise ValueError(f"it may have at most {MOST_JSON_BYTES} bytes, and has {size}")
        return _parse(_fill(file, 0, bytearray(size)), _number)


def _number(text: str) -> float:
    # `int` refuses numbers of many digits.
    return int(text) if text.isdigit() and len(text) <= 20 else float(text)


def _natural(text: str) -> int:
    if not (text.isdigit() and len(text) <= 20 and int(text) < 2**64):  # `-0` is none either
        raise ValueError(f"the number {show(text)} must be a whole one from 0 to 2^64 - 1")
    return int(text)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = collections.Counter(key for key, _ in pairs)
        raise ValueError(f"the key {show(keys.most_common(1)[0][0])} is there twice")
    for text in itertools.chain(found, found.values()):
        if type(text) is str:
            text.encode()  # half of a surrogate pair is an error
    return found


def _parse(raw: bytearray, number: Callable[[str], float]) -> dict[str, Any]:
    """A JSON object. `number` reads the text of a number."""
    parsed = json.loads(
        raw.decode(),
        object_pairs_hook=_pairs,
        parse_int=number,
        parse_float=number,
        parse_constant=number,  # Infinity and NaN, which configs may have
    )
    if type(parsed) is not dict:
        raise ValueError(f"the JSON {show(parsed)} must be an object")
    return parsed


def _read_entry(entry: Any) -> tuple[int, int, TensorSpec]:
    """Where the data of a tensor begins and ends, and what the header says of it."""
    if type(entry) is not dict or entry.keys() != set(_FIELDS):
        raise ValueError(f"{show(entry)} must have {', '.join(_FIELDS)} and nothing else")
    code, shape, offsets = (entry[field] for field in _FIELDS)
    if type(code) is not str or code not in _DTYPES:
        raise ValueError(f"cannot read dtype {show(code)}, only {', '.join(_DTYPES)}")
    for field, value in (("shape", shape), ("data_offsets", offsets)):
        if type(value) is not list or any(type(each) is not int for each in value):
            raise ValueError(f"{field}={show(value)} must be a list of whole numbers")
    spec = TensorSpec(_DTYPES[code], tuple(shape))
    _check_shape(spec)
    if len(offsets) != 2 or offsets[1] - offsets[0] != spec.nbytes:
        raise ValueError(
            f"data_offsets={show(offsets)} must be two that span {spec.nbytes} bytes, which dtype "
            f"{code} of shape {shape} has"
        )
    return offsets[0], offsets[1], spec


def _check_shape(spec: TensorSpec) -> None:
    """Raise an error unless NumPy has arrays of this shape."""
    dtype, shape = spec
    # The number of axes first: a product of many large numbers takes long.
    is_shape = len(shape) <= _MOST_AXES and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or math.prod(size or 1 for size in shape) * dtype.itemsize > _MOST_BYTES:
        raise ValueError(
            f"shape={show(shape)} must have at most {_MOST_AXES} axes, each a whole number, and "
            f"at most {_MOST_BYTES} bytes"
        )


def _encode(path: str, header: dict[str, Any]) -> bytes:
    """The header as the package writes it: compact, UTF-8, padded with spaces to 8 bytes."""
    try:
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise CheckpointError(f"{path}: a name or metadata is not Unicode: {error}.") from None
    if len(raw) > MOST_JSON_BYTES - 8:
        raise CheckpointError(
            f"{path}: the header has {len(raw)} bytes, and readers take at most {MOST_JSON_BYTES}. "
            f"Write the tensors into several files."
        )
    return raw + b" " * (-len(raw) % 8)
