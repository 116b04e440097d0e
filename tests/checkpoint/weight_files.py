"""Parameters, and what is in files, by code that does not import `jaxfp8.checkpoint`."""

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle

DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F16": np.float16,
    "U8": np.uint8,
    "I32": np.int32,
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def read_file(path) -> dict[str, np.ndarray]:
    """The tensors of one safetensors file."""
    raw = Path(path).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            raw[end + each["data_offsets"][0] : end + each["data_offsets"][1]],
            DTYPES[each["dtype"]],
        ).reshape(each["shape"])
        for name, each in header.items()
    }


def read_folder(folder) -> dict[str, np.ndarray]:
    """The tensors of all files of a folder."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        more = read_file(path)
        assert not tensors.keys() & more.keys()
        tensors |= more
    return tensors


def contents(folder) -> dict[str, str]:
    """All files below a folder, by their hashes: pytest would show the difference of bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


# Cells of a matrix [N, K], and the rule of the oracle, by format.
CELLS = {
    "hf-fp8": ((128, 128), "float32"),
    "hf-fp8-ue8m0": ((128, 128), "rceil"),
    "compressed-tensor": (None, "float32"),
    "compressed-channel": ((0,), "float32"),
    "compressed-block": ((128, 128), "float32"),
    "compressed-mxfp8": ((1, 32), "rceil"),
}
SCALE = {"hf-fp8": "weight_scale_inv", "hf-fp8-ue8m0": "weight_scale_inv"}
SHARES = ("compressed-tensor", "modelopt-fp8")  # a scale with matrices that engines merge


def dequantized(tensors, name: str, fmt: str) -> np.ndarray:
    """A matrix in float64: values times scales, which is exact."""
    values = tensors[f"{name}.weight"]
    scale = tensors[f"{name}.{SCALE.get(fmt, 'weight_scale')}"]
    assert values.dtype == DTYPES["F8_E4M3"]
    if scale.dtype in (np.uint8, DTYPES["F8_E8M0"]):
        scale = np.ldexp(1.0, scale.view(np.uint8).astype(np.int64) - 127)
    cells = CELLS.get(fmt, (None, ""))[0]
    wide = values.astype(np.float64)
    if cells is None:
        return wide * scale.reshape(())
    if cells == (0,):
        assert scale.shape == (len(values), 1)
        return wide * scale
    return wide * oracle.spread(scale.astype(np.float64), values.shape, cells)


def normal(seed, *shape, dtype="bfloat16"):
    """Normal numbers whose rows and columns differ in size."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * 0.02
    for axis, size in enumerate(shape):
        x *= np.exp2(random.integers(-3, 4, size)).reshape(
            [-1 if i == axis else 1 for i in range(len(shape))]
        )
    return jnp.asarray(x.astype(jnp.dtype(dtype)))


def tree(dtype="bfloat16"):
    """A model of two layers that are not square; "scale" and "bias" stay as they are."""
    return {
        "blocks": [
            {
                "up": {"kernel": normal(i, 256, 384, dtype=dtype), "bias": normal(9 + i, 384)},
                "down": {"kernel": normal(20 + i, 384, 256, dtype=dtype)},
                "norm": {"scale": 1 + normal(30 + i, 256, dtype="float32")},
            }
            for i in range(2)
        ],
        "embed": {"embedding": normal(40, 96, 256)},
    }


def matrices(params) -> dict[str, np.ndarray]:
    """The kernels of `tree` as matrices [N, K], by the name of their module."""
    return {
        f"blocks.{i}.{name}": np.asarray(block[name]["kernel"]).T
        for i, block in enumerate(params["blocks"])
        for name in ("up", "down")
    }


def same(a, b) -> bool:
    """Whether two trees have the same structure, dtypes and bits.

    Tests assert this and no equality of bytes, whose difference pytest shows for minutes.
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(
        map(np.asarray, jax.tree.leaves(a)), map(np.asarray, jax.tree.leaves(b)), strict=True
    )
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs
    )


def shapes_of(params):
    """The types of a tree, as `like`."""
    return jax.eval_shape(lambda: params)


def write(folder, tensors, config=None):
    """A checkpoint of these tensors, and a config of a format."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    header, end = {}, 0
    for name, each in tensors.items():
        ends = [end, end := end + each.nbytes]
        header[name] = {"dtype": CODES[each.dtype], "shape": each.shape, "data_offsets": ends}
    raw = json.dumps(header).encode()
    data = b"".join(each.tobytes() for each in tensors.values())
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder
