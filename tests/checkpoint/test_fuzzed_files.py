"""Ten thousand files, drawn and damaged: each is one error, or has the right bytes.

`truth` is a second reader, which knows nothing of the first. With safetensors 0.8.0 each file that
we accept was accepted, too.
"""

import os
import re
from collections import Counter

import numpy as np
from hostile_headers import CODES_OF, SIZES, file_of, truth

from jaxfp8.checkpoint._safetensors import CheckpointError, Reader

LITERALS = (
    "-1", "-0", "1.0", "1e0", "01", "true", "null", '"1"', "NaN", "Infinity", "[]", "{}", "[0]",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "9" * 5000, "[" * 2000, '"\\ud800"', "", "0", "1", "2", "3", "4", "8", "[1]", "[0,1]", "[1,1]",
)  # fmt: skip
CODES = (*SIZES, "F4", "F6_E2M3", "C64", "F8_E4M3FNUZ", "u8", "")
ODD_NAMES = ('"b"', '"__metadata__"', '"\\u0061"', '"\\ud83d\\ude00"', '"\\ud800"', '"\x01"', '"é"')


def draw(rng):
    """A file: usually good at first, then changed by what knows its structure."""
    pick = lambda options: options[rng.integers(len(options))]
    entries, data = [], b""
    for name in "abcd"[: rng.integers(1, 9) % 5]:
        code = pick(tuple(SIZES))
        shape = rng.integers(0, 4, rng.integers(4)).tolist()
        count = int(np.prod(shape, dtype=int)) * SIZES[code]
        offsets = [len(data), len(data) + count]
        data += rng.bytes(count) if code != "BOOL" else bytes(rng.integers(0, 2, count).tolist())
        fields = [
            ['"dtype"', f'"{code}"'],
            ['"shape"', f"{shape}"],
            ['"data_offsets"', f"{offsets}"],
        ]
        entries.append([f'"{name}"', fields])
    metadata = pick((*[""] * 10, *['"__metadata__":{"k":"v"}'] * 9, '"__metadata__":{"k":1}'))
    gap, length = pick(("", "", " ", "\n\t")), 0
    for _ in range(pick((0, 0, 1, 1, 1, 2)) if entries else 0):
        entry, other = pick(entries), pick(entries)
        field = pick(entry[1]) if entry[1] else ["", ""]
        digits = list(re.finditer("[0-9]+", field[1]))
        match pick(KINDS):
            case "digits" if digits:
                at = pick(digits)
                value = pick((str(int(at[0][:20]) + 1), str(int(at[0][:20]) - 1), pick(LITERALS)))
                field[1] = field[1][: at.start()] + value + field[1][at.end() :]
            case "literal":
                field[1] = pick(LITERALS)
            case "dtype":
                entry[1][0:1] = [['"dtype"', f'"{pick(CODES)}"']]
            case "axis":
                field[1] = field[1].replace("[", pick(("[1, ", "[0, ", "[2, ", "[" + "1," * 70)), 1)
            case "order of fields":
                rng.shuffle(entry[1])
            case "order":
                rng.shuffle(entries)
            case "exchange":
                entry[1], other[1] = other[1], entry[1]
            case "exchange names":
                entry[0], other[0] = other[0], entry[0]
            case "field twice":
                entry[1].append(list(field))
            case "no field":
                entry[1][:] = entry[1][:-1]
            case "more":
                entry[1].append(['"x"', pick(LITERALS)])
            case "twice":
                entries.append([entry[0], [list(each) for each in entry[1]]])
            case "copy":
                entries.append(['"copy"', [list(each) for each in entry[1]]])
            case "gone":
                entries.remove(entry)
                if not entries:
                    break
            case "name":
                entry[0] = pick(ODD_NAMES)
            case "nothing":
                entries.append(
                    [
                        '"nothing"',
                        [
                            ['"dtype"', '"F32"'],
                            ['"shape"', "[0]"],
                            [
                                '"data_offsets"',
                                pick(("[0,0]", f"[{len(data)},{len(data)}]", "[1,1]")),
                            ],
                        ],
                    ]
                )
            case "length":
                length = pick((-1, 1, 8, 2**31, 2**63))
    texts = [
        f"{name}:{gap}{{{','.join(f'{key}:{gap}{value}' for key, value in fields)}}}"
        for name, fields in entries
    ]
    header = (
        gap + "{" + f",{gap}".join([*([metadata] if metadata else []), *texts]) + "}" + gap
    ).encode()
    length = (len(header) + length) % 2**64
    raw = bytearray(file_of(header, data, length))
    match rng.integers(16):
        case 0:
            raw = raw[: rng.integers(len(raw) + 1)]
        case 1:
            raw += rng.bytes(rng.integers(1, 9))
        case 2:
            raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
        case 3 if data:
            raw[8 + len(header) + rng.integers(len(data))] = 2
        case 4:
            begin, to, size = rng.integers(len(raw), size=3) // (1, 1, 4)
            raw[to : to + size] = raw[begin : begin + size]
        case 5:
            begin, to, size = rng.integers(len(raw), size=3) // (1, 1, 4)
            raw[to:to] = raw[begin : begin + size]
    return bytes(raw)


KINDS = (
    "digits", "digits", "digits", "literal", "dtype", "axis", "axis", "order of fields", "order",
    "exchange", "exchange names", "field twice", "no field", "more", "twice", "copy", "gone",
    "name", "nothing", "length",
)  # fmt: skip


def drawn_files(count):
    rng = np.random.default_rng(7)
    return (draw(rng) for _ in range(count))


FAULTS = (
    "Extra data", "Expecting", "control character", "(char", "decode byte", "surrogates",
    "nested too deep",
    "is there twice", "must be a whole one", "the header has", "by its header",
    "must have at least 8", "must be a dict of texts", "and nothing else", "cannot read dtype",
    "must be a list", "must be two", "must begin at", "at most 64 axes",
)  # fmt: skip


def test_ten_thousand_files(tmp_path):
    path, outcomes = tmp_path / "f.safetensors", Counter()
    for raw in drawn_files(10_000):
        path.write_bytes(raw)
        expected, message = truth(raw), None
        try:
            with Reader(path) as reader:
                found = what_is_read(reader)
        except CheckpointError as error:
            found, message = None, str(error)
        assert found == expected, (raw, message)
        if message is None:
            outcomes["accepted" if expected else "empty"] += 1
        else:
            assert len(message) < 1000
            fault = [fault for fault in (*FAULTS, "BOOL") if fault in message]
            assert fault, message
            outcomes[fault[0]] += 1
        assert os.listdir(tmp_path) == ["f.safetensors"]
    assert 2000 < outcomes["accepted"] < 7000, outcomes
    assert outcomes["empty"] < 1500, outcomes
    assert set(FAULTS) < outcomes.keys(), set(FAULTS) - outcomes.keys()


def what_is_read(reader):
    """What `truth` says, from all tensors: once whole, and once in two pieces."""
    found = {}
    for name, (dtype, shape) in reader.specs.items():
        whole = reader.read(name)
        assert (whole.dtype, whole.shape) == (dtype, shape)
        if shape:
            middle = shape[0] // 2
            pieces = [reader.read(name, 0, middle), reader.read(name, middle)]
            assert b"".join(piece.tobytes() for piece in pieces) == whole.tobytes()
        found[name] = (CODES_OF[str(dtype)], shape, whole.tobytes())
    return found
