"""`load`: the parameters of a model from a checkpoint that other programs wrote."""

import dataclasses
import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import PyTree
from jaxfp8.checkpoint._encode import dequantize_rows, narrowed, pieces_of
from jaxfp8.checkpoint._folder import Checkpoint
from jaxfp8.checkpoint._formats import VALUES, Format, format_named, format_of_config
from jaxfp8.checkpoint._grid import Scales, as_dtype, grid_of
from jaxfp8.checkpoint._layouts import Names, rows_for
from jaxfp8.checkpoint._names import Entry, entries_of, parameters_of
from jaxfp8.checkpoint._safetensors import CheckpointError, TensorSpec, read_json, show
from jaxfp8.numerics._exact import LARGEST, TINY
from jaxfp8.numerics._formats import E4M3, E8M0
from jaxfp8.ops._quantize_params import path_name, requantize
from jaxfp8.state._saved import holds, listed
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight

# What a file has for each parameter, checked before a tensor is read.


class Found(NamedTuple):
    """A tensor of the file for one entry."""

    entry: Entry
    spec: TensorSpec
    scale: str | None  # the name of its scale


def load(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    names: Names = None,
    format: str | Format | None = None,
    skip: Sequence[str] = (),
) -> PyTree:
    """Read the parameters of a model from a checkpoint in safetensors.

    The file may be in bfloat16, or in one of `FORMATS`, which its config names. A matrix in FP8
    becomes what `like` has at its place:

    - an array: it is dequantized in float32, and rounded to the dtype of the array.
    - a `QuantizedWeight`: values and scales are those of the file, bit for bit. Its recipe must
      have one copy of weights and no state, as `current()`, `blockwise()` and
      `mxfp8(w_tile_dim=2)`, and scales for the same values.

    A matrix in high precision becomes a `QuantizedWeight` by the cast of its recipe.

    Names, dtypes and shapes of all tensors are checked before the first is read. No array of `like`
    is read or changed.

    Args:
      path: a folder, a file or an index.
      like: the parameters of a linen model (`variables["params"]`), an nnx model, or any tree of
        arrays and `QuantizedWeight`s, also of `jax.ShapeDtypeStruct`s from `jax.eval_shape`. The
        result has their dtypes and shardings.
      names: the `Row`s that say which tensor is which parameter, as for `export`.
      format: the format of the file. Default: what config.json or hf_quant_config.json says.
      skip: patterns of names of tensors that the model does not have: ("*.inv_freq",).

    Returns:
      A tree like `like`. In an nnx model Variables other than `nnx.Param` are those of `like`.

    Raises:
      CheckpointError: if the file is damaged, if it lacks tensors or has others, or if a matrix has
        no scale or one of another shape. It is a ValueError.
      ValueError: if the model cannot hold what the file has.
      OSError: if there is no file.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> params = {"up": {"kernel": jnp.ones((256, 128), jnp.bfloat16)}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = fp8.checkpoint.export(params, folder, format="hf-fp8")
      ...     back = fp8.checkpoint.load(folder, like=params)
      >>> bool((back["up"]["kernel"] == params["up"]["kernel"]).all())
      True
    """
    if isinstance(skip, str):
        raise TypeError(f'skip={skip!r} must be patterns of tensors: skip=("*.inv_freq",).')
    parameters = parameters_of(like)
    rows = rows_for(names, parameters)
    with Checkpoint(path) as file:
        known = format_named(format) or _format_of(Path(file.path).parent)
        found = _find(file, entries_of(rows, parameters), parameters, known, tuple(skip))
        loaded = {name: _leaf(file, found[name], leaf, known) for name, leaf in parameters.items()}

    def one(keys: Any, leaf: Any) -> Any:
        return loaded.get(path_name(keys), leaf)

    return jax.tree_util.tree_map_with_path(one, like, is_leaf=is_weight)


def _format_of(folder: Path) -> Format | None:
    """The format that the configs of a folder name; None if they name none."""
    for name, key in (
        ("config.json", "quantization_config"),
        ("hf_quant_config.json", "quantization"),
    ):
        file = folder / name
        if not file.is_file():
            continue
        config = read_json(file)
        if (own := config.get(key)) is None:
            continue
        if not isinstance(own, Mapping):
            raise CheckpointError(f"{file}: {key} must be an object, and is {show(own)}.")
        return format_of_config(own, str(file))
    return None


def _find(
    file: Checkpoint,
    entries: Sequence[Entry],
    parameters: Mapping[str, Any],
    format: Format | None,
    skip: tuple[str, ...],
) -> dict[str, list[Found]]:
    """The tensors of each parameter. CheckpointError unless all fit, and none is left."""
    faults: list[str] = []
    found: dict[str, list[Found]] = {path: [] for path in parameters}
    left = {
        name: None for name in file.specs if not any(fnmatch.fnmatchcase(name, p) for p in skip)
    }
    for entry in entries:
        spec = file.specs.get(entry.name)
        if spec is None:
            faults.append(f"  {entry.name} is missing; it is {entry.path}")
            continue
        left.pop(entry.name, None)
        scale = None
        if spec.dtype.itemsize == 1 and spec.dtype.kind not in "iub":
            scale, why = _scale_of(file, entry, spec, format)
            left.pop(scale or "", None)
            if format is not None and format.static_inputs:
                left.pop(format.input_scale_name_of(entry.name), None)
        else:
            why = _misfit(entry, spec, parameters[entry.path])
        if spec.shape != entry.file_shape:
            why = f"has the shape {list(spec.shape)}, and {list(entry.file_shape)} is needed"
        if why:
            faults.append(f"  {entry.name} {why}; it is {entry.path}")
        found[entry.path].append(Found(entry, spec, scale))
    faults += [f"  {name} is no parameter of the model" for name in left]
    if faults:
        raise CheckpointError(
            f"{file.path} does not fit the model:\n{listed(faults)}\nNames of tensors come from "
            "names=. Tensors that the model does not need are left out by skip=."
        )
    return found


def _scale_of(
    file: Checkpoint, entry: Entry, spec: TensorSpec, format: Format | None
) -> tuple[str | None, str]:
    """The name of the scale of a matrix in FP8, and what is wrong with it."""
    if format is None:
        return None, f"is {spec.dtype}, but no config names its format. Pass format="
    if spec.dtype != VALUES or entry.row.kind != "linear":
        return None, f"is {spec.dtype}, but only matrices of linear layers are read, in {VALUES}"
    if len(spec.shape) != 2 or 0 in spec.shape:
        return None, f"is {spec.dtype}{list(spec.shape)}, which is no matrix"
    names = format.names_to_read(entry.name)
    name = next((name for name in names if name in file.specs), None)
    if name is None:
        return None, f"has no scale: {names[0]} is missing"
    own = file.specs[name]
    wanted = format.scale_spec(spec.shape)
    # Writers of a scale for a tensor disagree about its axes.
    fits = own.shape == wanted.shape or (format.cells == "tensor" and set(own.shape) <= {1})
    dtypes = [np.dtype(np.float32), jnp.dtype(jnp.bfloat16), np.dtype(np.float16)]
    dtypes += [np.dtype(E8M0.dtype), *([np.dtype(np.uint8)] if format.exponents else [])]
    if not fits or own.dtype not in dtypes:
        return name, (
            f"has a scale {own.dtype}{list(own.shape)}, but {format.name!r} needs "
            f"{wanted.dtype}{list(wanted.shape)}"
        )
    return name, ""


def _misfit(entry: Entry, spec: TensorSpec, leaf: Any) -> str:
    """Why a parameter cannot hold a tensor in high precision; empty if it can."""
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return f"is for {leaf.dtype}, which JAX has with jax_enable_x64 only"
    if holds(jnp.dtype(leaf.dtype), spec.dtype):
        return ""
    return (
        f"is {spec.dtype}, which {jnp.dtype(leaf.dtype)} cannot hold. Load it as {spec.dtype}, and "
        "round it then"
    )


# The tensors of one parameter, as the parameter.


def _leaf(file: Checkpoint, found: list[Found], leaf: Any, format: Format | None) -> Any:
    if not is_weight(leaf):
        return _on_devices(_array(file, found, leaf.shape, leaf.dtype, format), leaf)
    path = found[0].entry.path
    if leaf.recipe.rows:
        raise ValueError(
            f"{path} is {leaf}, whose scale comes from quantizer state. Load it as an array, and "
            "cast it: fp8.quantize_params(params, recipe, state=...)."
        )
    if all(each.scale is None for each in found):
        w = _on_devices(_array(file, found, leaf.shape, leaf.dtype, format), leaf.values[0])
        return requantize(leaf, w, name=path)
    if len(leaf.values) > 1 or leaf.original is not None:
        raise ValueError(
            f"{path} is {leaf}. It holds more than the values that {file.path} has: "
            f"{len(leaf.values)} copies, original={leaf.original is not None}. Use a recipe with "
            "one copy, such as blockwise() or mxfp8(w_tile_dim=2), and primary=True. Or load it "
            "as an array, and cast it."
        )
    assert format is not None
    return _weight(file, found, leaf, format)


def _array(
    file: Checkpoint, found: list[Found], shape: Any, dtype: Any, format: Format | None
) -> np.ndarray:
    """The parameter on the host, in high precision."""
    out = np.empty(shape, jnp.dtype(dtype))
    for entry, spec, name in found:
        scales = None if name is None or format is None else _scales(file, name, spec, format)
        for rows in pieces_of(entry, format):
            part = file.read(entry.name, *_bounds(spec, rows))
            if scales is not None:
                part = dequantize_rows(part, scales.spread(rows))
            part, region = narrowed(entry.name, part, out.dtype), entry.region(rows)
            out[region] = entry.axes.from_file(part, tuple(r.stop - r.start for r in region))
    return out


def _bounds(spec: TensorSpec, rows: slice) -> tuple[int, int | None]:
    return (rows.start, rows.stop) if spec.shape else (0, None)


def _scales(file: Checkpoint, name: str, spec: TensorSpec, format: Format) -> Scales:
    """The scales of a matrix in FP8. CheckpointError if one cannot be a scale."""
    scale = file.read(name)
    if scale.dtype == np.uint8:
        scale = scale.view(E8M0.dtype)
    wide = scale.astype(np.float32)
    # Scales of casts are normal numbers, and no value times its scale is above float32's largest.
    least = 0.0 if scale.dtype == E8M0.dtype else TINY
    fits = (wide > 0) & (wide >= least) & (wide <= LARGEST / E4M3.max * (1 + 1e-6))
    if not np.all(fits):
        raise CheckpointError(
            f"{file.path}: {name} holds {wide[~fits].flat[0]!s}, and a scale must be positive, "
            "finite, and not so large that values overflow float32. Copy or download the file "
            "again."
        )
    scale = scale if scale.dtype == E8M0.dtype else wide
    cells = [-(-n // side) for n, side in zip(spec.shape, format.sides(spec.shape), strict=True)]
    return Scales.of_file(scale.reshape(cells), format, spec.shape)


def _weight(
    file: Checkpoint, found: list[Found], leaf: QuantizedWeight, format: Format
) -> QuantizedWeight:
    """A weight with the values and the scales of the file."""
    values = np.empty(leaf.shape, jnp.dtype(leaf.values[0].dtype))
    scales = np.empty(leaf.scales[0].shape, jnp.dtype(leaf.scales[0].dtype))
    exact = leaf.recipe.fprop.rhs.rule.exact
    for entry, spec, name in found:
        if name is None or spec.dtype != values.dtype:
            raise ValueError(
                f"{entry.path} is {leaf} of {values.dtype}, but {entry.name} is {spec.dtype}. "
                "Load it as an array, and cast it."
            )
        grid, held = grid_of(entry, leaf), _scales(file, name, spec, format)
        own = held.by_cells(grid.rows, grid.columns)
        fitted = None if own is None else as_dtype(own, scales.dtype)
        if fitted is not None and exact and as_dtype(fitted, E8M0.dtype) is None:
            fitted = None
        if fitted is None:
            raise ValueError(
                f"{entry.path} is {leaf}, which cannot have the scales of {entry.name}: "
                f"{format.name!r} has other cells, or scales that are no powers of two. Load it as "
                "an array, and cast it."
            )
        grid.put(scales, fitted)
        for rows in pieces_of(entry, format):
            region = entry.region(rows)
            part = file.read(entry.name, rows.start, rows.stop)
            values[region] = entry.axes.from_file(part, tuple(r.stop - r.start for r in region))
    return dataclasses.replace(
        leaf,
        values=(_on_devices(values, leaf.values[0]),),
        scales=(_on_devices(scales, leaf.scales[0]),),
    )


def _on_devices(array: np.ndarray, like: Any) -> jax.Array:
    """An array of JAX, with the sharding of `like` if that has one."""
    sharding = getattr(like, "sharding", None)
    if isinstance(like, jax.Array) and not like.committed:
        sharding = None
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
