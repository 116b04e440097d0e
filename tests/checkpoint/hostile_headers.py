"""Headers of safetensors files as text, right and wrong, and a reader for these tests.

`truth` knows nothing of the reader of the library.
"""

import json
import re
import struct

import numpy as np

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1}
SIZES |= {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4}
SIZES |= {"F64": 8, "I64": 8, "U64": 8}
CODES_OF = {"bool": "BOOL", "bfloat16": "BF16", "float8_e5m2": "F8_E5M2"}
CODES_OF |= {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
CODES_OF |= {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
CODES_OF |= {f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)}
CODES_OF |= {f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)}


def file_of(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(dtype='"U8"', shape="[1]", offsets="[0,1]", more="", name='"a"'):
    return f'{{{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}}}'


T = one()[5:-1]
DEEP = "[" * 100_000


class Pairs(list):
    """An object of JSON as the list of its pairs."""


def truth(raw):
    """{name: (dtype, shape, data)} as the bytes say, or None if they say nothing."""
    try:
        (length,) = struct.unpack_from("<Q", raw)
        text = raw[8 : 8 + length].decode()
        # A number stays a text in a tuple. Recursion is an error of its own.
        kept = {name: (lambda text: (text,)) for name in ("parse_int", "parse_float")}
        header = json.loads(text, object_pairs_hook=Pairs, parse_constant=int, **kept)
    except (struct.error, ValueError, RecursionError):
        return None
    if not isinstance(header, Pairs) or 8 + length > len(raw):
        return None
    found, spans, data = {}, [], raw[8 + length :]
    for name, entry in header:
        if not isinstance(entry, Pairs) or name in found or not encodes(name):
            return None
        if name == "__metadata__":
            texts = [text for pair in entry for text in pair]
            unique = len({key for key, _ in entry}) == len(entry)
            if not unique or not all(isinstance(text, str) and encodes(text) for text in texts):
                return None
            found[name] = None
            continue
        if sorted(key for key, _ in entry) != ["data_offsets", "dtype", "shape"]:
            return None
        fields = dict(entry)
        numbers = [*naturals(fields["shape"]), *naturals(fields["data_offsets"])]
        code = fields["dtype"]
        if None in numbers or not isinstance(code, str) or code not in SIZES:
            return None
        if not isinstance(fields["data_offsets"], list) or len(fields["data_offsets"]) != 2:
            return None
        *shape, begin, end = numbers
        try:
            values = np.empty(shape if 0 in shape else [1] * len(shape), f"V{SIZES[code]}")
        except (ValueError, OverflowError):  # NumPy has no such arrays
            return None
        del values
        count = 0 if 0 in shape else 1
        for size in shape:
            count = min(count * size, 2**70)
        if begin + count * SIZES[code] != end:
            return None
        if code == "BOOL" and max(data[begin:end], default=0) > 1:
            return None
        spans.append((begin, end))
        found[name] = (code, tuple(shape), data[begin:end])
    ends = [0, *(end for _, end in sorted(spans))]
    if ends[-1] != len(data) or any(
        begin != end for (begin, _), end in zip(sorted(spans), ends, strict=False)
    ):
        return None
    found.pop("__metadata__", None)
    return found


def encodes(text):
    return not re.search("[\ud800-\udfff]", text)


def naturals(values):
    """A list of JSON as numbers, with None for what is none."""
    if not isinstance(values, list) or isinstance(values, Pairs) or len(values) > 64:
        return [None]
    is_natural = lambda text: re.fullmatch("0|[1-9][0-9]{0,19}", text) and int(text) < 2**64
    return [
        int(value[0]) if isinstance(value, tuple) and is_natural(value[0]) else None
        for value in values
    ]
