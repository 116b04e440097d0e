"""`export`: the parameters of a model as a checkpoint that other programs load."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxfp8._check import check_int
from jaxfp8._typing import DType, PyTree
from jaxfp8.checkpoint._encode import How
from jaxfp8.checkpoint._folder import INDEX, SINGLE
from jaxfp8.checkpoint._formats import Format, hf_quant_config
from jaxfp8.checkpoint._layouts import Names
from jaxfp8.checkpoint._plan import Item, Plan, plan_of
from jaxfp8.checkpoint._safetensors import Writer


class Exported(NamedTuple):
    """What `export` wrote.

    Attributes:
      files: their paths.
      how: for the weight of each tensor, how it was made: "as it is", "cast", "cast again" (from
        FP8 values whose scales the format cannot hold), or "dequantized" (in high precision, from
        FP8 values).

    Example:
      >>> done = Exported((Path("out/model.safetensors"),), {"up.weight": "cast"})
      >>> [name for name, how in done.how.items() if how == "cast again"]
      []
    """

    files: tuple[Path, ...]
    how: dict[str, How]


def export(
    params: PyTree,
    path: str | os.PathLike[str],
    *,
    format: str | Format | None,
    names: Names = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ignore: Sequence[str] = (),
    dtype: DType | None = None,
    state: PyTree | None = None,
    tensor_parallel: int = 1,
    max_shard_bytes: int = 5 * 10**9,
) -> Exported:
    """Write parameters as a checkpoint that other programs load: safetensors and config.json.

    Matrices of linear layers are written in FP8, other parameters as they are. If `params` has
    weights in FP8 (`fp8.quantize_params`), these are written in FP8 and no others: their values and
    scales go out as they are if the format can hold the scales, and are cast again otherwise.
    Embeddings, heads and routers are never in FP8. If `params` has them in FP8, they are
    dequantized: exclude them by `rules=` of `fp8.quantize_params`.
    Without weights in FP8, all matrices are cast by the rule of the format.

    Tensors are made and written in pieces. Files are written beside those that are there, and
    renamed when all are complete. So an export that fails leaves the old files.

    Args:
      params: the parameters of a linen model (`variables["params"]`), an nnx model, or any tree of
        arrays and `QuantizedWeight`s. Arrays may be split over the devices of this process.
      path: a folder. It is made if it is missing. Files of other names stay.
      format: "hf-fp8", "hf-fp8-ue8m0", "compressed-tensor", "compressed-channel",
        "compressed-block", "compressed-mxfp8", "modelopt-fp8" (see `FORMATS`), or None for a
        checkpoint without FP8.
      names: the `Row`s that say which tensor is which parameter, for instance of
        `fp8.checkpoint.names`, or the name of a layout. Default: the path with dots and Hugging
        Face's last words, as in `blocks.0.up.weight` for a kernel [in, out].
      config: the config of the model, as a dict or as the path of a config.json or of its folder.
        The file gets its fields and the `quantization_config`. Default: those of a config.json that
        is at `path`, or none.
      ignore: patterns of names of modules that stay in high precision: ("*.down_proj",). Of
        matrices that engines merge, name all: ("*.gate_proj", "*.up_proj").
      dtype: the dtype of parameters in high precision, bfloat16 for instance. Default: their own.
      state: quantizer state of training, for a format with scales of inputs ("modelopt-fp8").
      tensor_parallel: over how many devices an engine will split the matrices.
      max_shard_bytes: the most bytes of tensors in a file. A tensor is not split.

    Returns:
      The files, and how each weight was made.

    Raises:
      TypeError, ValueError: for an argument, with the cure; if a matrix holds a NaN or an inf; if
        an engine could not load the blocks of a matrix.
      FP8StateError: if the state of a matrix is missing or unset.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> params = {"up": {"kernel": jnp.ones((256, 128)), "bias": jnp.zeros(128)}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     done = fp8.checkpoint.export(params, folder, format="hf-fp8")
      >>> [file.name for file in done.files]
      ['model.safetensors', 'config.json']
      >>> done.how
      {'up.bias': 'as it is', 'up.weight': 'cast'}

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3 (tiles of 128x128 and their scales).
    """
    check_int("max_shard_bytes", max_shard_bytes, "a number of bytes")
    plan = plan_of(
        params, format, names, ignore=ignore, dtype=dtype, state=state,
        tensor_parallel=tensor_parallel,
    )  # fmt: skip
    folder = Path(path)
    texts = _configs(plan, _config_of(config, folder), folder)
    if jax.process_index() > 0:  # all processes have the same parameters
        return Exported((), {})
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    _check_replaceable(folder)
    new = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        how = _write(plan, new, max_shard_bytes)
        for name, text in texts.items():
            (new / name).write_text(text)
        files = _replace(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else has written there
            for each in made:
                each.rmdir()
        raise
    return Exported(tuple(folder / name for name in files), how)


def _config_of(given: Any, folder: Path) -> dict[str, Any]:
    """The config of the model, without that of a format."""
    if given is None:
        given = folder / "config.json" if (folder / "config.json").exists() else {}
    if isinstance(given, str | os.PathLike):
        source = Path(given)
        source = source / "config.json" if source.is_dir() else source
        try:
            given = json.loads(source.read_text())
        except ValueError as error:
            raise ValueError(f"config={str(source)!r} is no JSON: {error}.") from None
    if not isinstance(given, Mapping):
        raise TypeError(
            f"config={given!r} must be a dict, or the path of a config.json or of its folder."
        )
    return {key: value for key, value in given.items() if key != "quantization_config"}


def _configs(plan: Plan, config: dict[str, Any], folder: Path) -> dict[str, str]:
    """The text files of a checkpoint by name."""
    texts = {}
    if plan.format is not None:
        config["quantization_config"] = plan.format.config(plan.format, plan.kept)
        if plan.format.hf_quant_config:
            texts["hf_quant_config.json"] = _json(hf_quant_config(plan.kept))
    if config or (folder / "config.json").exists():  # an older one may name another format
        texts["config.json"] = _json(config)
    return texts


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _shards(plan: Plan, most: int) -> list[list[Item]]:
    """The items of each file: those that follow each other, up to so many bytes."""
    shards: list[list[Item]] = [[]]
    held = 0
    for item in plan.items:
        size = sum(spec.nbytes for spec in item.specs.values())
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(item)
        held += size
    return shards


def _write(plan: Plan, folder: Path, most: int) -> dict[str, How]:
    """Write the tensors, and the index of several files."""
    shards, how = _shards(plan, most), {}
    weight_map: dict[str, str] = {}
    for number, items in enumerate(shards, start=1):
        one = len(shards) == 1
        file = SINGLE if one else f"model-{number:05}-of-{len(shards):05}.safetensors"
        specs = {name: spec for item in items for name, spec in item.specs.items()}
        # transformers refuses files without this word.
        with Writer(folder / file, specs, {"format": "pt"}) as writer:
            for item in items:
                how[item.entry.name], tensors = plan.encode(item)
                for tensor in tensors:
                    for rows in tensor.pieces():
                        writer.write(tensor.name, rows)
        weight_map |= dict.fromkeys(specs, file)
    if len(shards) > 1:
        total = sum(spec.nbytes for item in plan.items for spec in item.specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(_json(index))
    return how


_OURS = (SINGLE, "model-*-of-*.safetensors", INDEX, "hf_quant_config.json")


def _old(folder: Path) -> list[Path]:
    """The files of an earlier checkpoint in a folder."""
    return [path for pattern in _OURS for path in sorted(folder.glob(pattern))]


def _check_replaceable(folder: Path) -> None:
    for path in (*_old(folder), folder / "config.json"):
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file, so it cannot be replaced. Export elsewhere.")


def _replace(new: Path, folder: Path) -> list[str]:
    """Move complete files into their folder, and remove those of an earlier checkpoint."""
    files = sorted(path.name for path in new.iterdir())
    # config.json comes last: it tells how to read the tensors.
    files.sort(key=lambda name: (not name.endswith(".safetensors"), name == "config.json"))
    for name in files:
        os.replace(new / name, folder / name)
    for path in _old(folder):
        if path.name not in files:
            path.unlink()
    new.rmdir()
    return files
