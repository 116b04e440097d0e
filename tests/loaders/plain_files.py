"""Safetensors files without jaxfp8: headers, bytes, and what their FP8 values stand for.

It shares no code with `jaxfp8.checkpoint`, so that a fault there cannot hide here.
"""

import json
import struct
from pathlib import Path

import numpy as np

HEADER_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
SIZE = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}
SCALES = ("weight_scale_inv", "weight_scale")


def _files(folder):
    return sorted(Path(folder).glob("*.safetensors"))


def _open(file):
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def header_of(folder):
    """{name: {"dtype", "shape", "data_offsets"}} of all files."""
    found = {}
    for file in _files(folder):
        header, _ = _open(file)
        assert header.pop("__metadata__") == {"format": "pt"}
        assert not found.keys() & header.keys()
        found |= header
    return found


def read(folder):
    """{name: (dtype, array)} with the bits of each value as an unsigned integer."""
    found = {}
    for file in _files(folder):
        header, data = _open(file)
        header.pop("__metadata__")
        for name, spec in header.items():
            part = data[slice(*spec["data_offsets"])]
            bits = np.frombuffer(part, f"<u{SIZE[spec['dtype']]}")
            found[name] = spec["dtype"], bits.reshape(spec["shape"])
    return found


def write(folder, tensors):
    """Write the tensors of `read` into one file, where an export was."""
    header, chunks, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, (dtype, bits) in tensors.items():
        chunks.append(np.ascontiguousarray(bits).tobytes())
        end = at + len(chunks[-1])
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    (Path(folder) / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(chunks)
    )


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def e4m3(bits):
    """The values of E4M3: 4 bits of exponent with bias 7, 3 of mantissa, no inf."""
    bits = bits.astype(np.int32)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    assert not np.any((exponent == 15) & (mantissa == 7)), "a NaN"
    size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(bits >> 7, -size, size).astype(np.float32)


def scale_of(dtype, bits):
    """The values of scales. Bytes are exponents with bias 127."""
    if dtype == "F32":
        return bits.view(np.float32)
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    assert dtype in ("F8_E8M0", "U8")
    return (2.0 ** (bits.astype(np.float64) - 127)).astype(np.float32)


def round_to_bf16(x):
    """The bits of float32 values in bfloat16, to the nearest, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def cells_of(config, shape):
    """How many rows and columns share a scale, by the text of the config."""
    quantization = config["quantization_config"]
    if quantization["quant_method"] == "fp8":
        return quantization["weight_block_size"]
    if quantization["quant_method"] == "modelopt":
        assert quantization["quant_algo"] == "FP8"
        return shape
    (group,) = quantization["config_groups"].values()
    weights = group["weights"]
    return {
        "tensor": lambda: shape,
        "channel": lambda: (1, shape[1]),
        "block": lambda: weights["block_structure"],
        "group": lambda: (1, weights["group_size"]),
    }[weights["strategy"]]()


def scale_name_of(tensors, name):
    """The name of the scale of a weight in FP8."""
    found = [each for s in SCALES if (each := f"{name.removesuffix('weight')}{s}") in tensors]
    assert len(found) == 1, f"{name} has the scales {found}"
    return found[0]


def spread(scale, cells, shape):
    """A scale for each value of a matrix."""
    rows, columns = (-(-n // side) for n, side in zip(shape, cells, strict=True))
    scale = scale.reshape(rows, columns)
    return np.repeat(np.repeat(scale, cells[0], 0), cells[1], 1)[: shape[0], : shape[1]]


def wide(folder):
    """{name: float32 [N, K]} of the matrices in FP8 of an export."""
    tensors, config, found = read(folder), config_of(folder), {}
    for name, (dtype, bits) in tensors.items():
        if dtype == "F8_E4M3":
            scale = scale_of(*tensors[scale_name_of(tensors, name)])
            found[name] = e4m3(bits) * spread(scale, cells_of(config, bits.shape), bits.shape)
    return found


def dequantized(folder):
    """{name: bits in bfloat16} of all parameters of an export."""
    found = {name: bits for name, (dtype, bits) in read(folder).items() if dtype == "BF16"}
    return found | {name: round_to_bf16(values) for name, values in wide(folder).items()}


def bits_apart(left, right):
    """How many bits differ, and of how many."""
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    return int(np.bitwise_count(left ^ right).sum()), left.size * left.itemsize * 8


def index_of(folder):
    return json.loads((Path(folder) / "model.safetensors.index.json").read_text())
