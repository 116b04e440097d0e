"""The plan of a checkpoint: which tensors it has, and what engines could not load.

Rules of engines are those of vLLM 0.33 and SGLang 0.5.23, which merge matrices and split them over
devices: docs/checkpoints.md has them with their sources.
"""

import fnmatch
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._check import check_int, check_one_of
from jaxfp8._typing import DType, FP8StateError, PyTree
from jaxfp8.checkpoint._encode import FileTensor, How, encode, specs_of
from jaxfp8.checkpoint._formats import Format, format_named
from jaxfp8.checkpoint._grid import grid_of, read_region
from jaxfp8.checkpoint._layouts import Names, rows_for
from jaxfp8.checkpoint._names import LINEAR, Entry, entries_of, parameters_of
from jaxfp8.checkpoint._safetensors import TensorSpec
from jaxfp8.numerics._formats import FLOAT_DTYPES
from jaxfp8.ops._quantize_params import find_state, states_by_path
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight

# The plan: what becomes of each parameter.


class Item(NamedTuple):
    """A parameter, or one of those that it stacks, and the format of its tensor."""

    entry: Entry
    leaf: Any
    format: Format | None
    specs: dict[str, TensorSpec]
    peers: tuple[tuple[Entry, Any], ...] = ()  # matrices whose scale it shares
    input_scale: float | None = None


class Plan(NamedTuple):
    """The tensors of a checkpoint."""

    items: list[Item]
    format: Format | None
    dtype: DType | None
    kept: list[str]  # modules of linear layers in high precision

    def encode(self, item: Item) -> tuple[How, list[FileTensor]]:
        return encode(
            item.entry, item.leaf, item.format, dtype=self.dtype, peers=item.peers,
            input_scale=item.input_scale,
        )  # fmt: skip


def plan_of(
    params: PyTree,
    format: str | Format | None,
    names: Names,
    *,
    ignore: Sequence[str],
    dtype: DType | None,
    state: PyTree | None,
    tensor_parallel: int,
) -> Plan:
    """What a checkpoint of these parameters has. No array is read but scales of states."""
    chosen = format_named(format)
    check_int("tensor_parallel", tensor_parallel, "a number of devices")
    if isinstance(ignore, str) or not all(isinstance(each, str) for each in ignore):
        raise TypeError(f'ignore={ignore!r} must be patterns of modules: ignore=("*.down_proj",).')
    if dtype is not None:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)
        check_one_of("dtype", name, FLOAT_DTYPES)
        dtype = jnp.dtype(dtype)
    parameters = parameters_of(params)
    for path, leaf in parameters.items():
        if not isinstance(leaf, jax.Array | np.ndarray | QuantizedWeight):
            raise TypeError(f"{path} is {leaf!r}, but an export needs arrays. Pass the parameters.")
    rows = rows_for(names, parameters)
    entries = entries_of(rows, parameters)
    trained = any(is_weight(leaf) for leaf in parameters.values())
    used: set[str] = set()

    def in_fp8(entry: Entry) -> bool:
        # A kernel of other axes is no matrix, which `_check_matrix` then says.
        is_kernel = names is None and entry.path.endswith("kernel")
        if not is_kernel and entry.row.kind not in LINEAR:
            return False
        ignored = [each for each in ignore if fnmatch.fnmatchcase(entry.module, each)]
        used.update(ignored)
        # Layers that training left in high precision stay there.
        is_fp8 = is_weight(parameters[entry.path]) or not trained
        wanted = chosen is not None and not ignored and is_fp8
        return wanted and (entry.row.kind == "linear" or (is_kernel and entry.row.kind == "plain"))

    chosen_entries = {entry.name: in_fp8(entry) for entry in entries}
    if unused := [each for each in ignore if each not in used]:
        raise ValueError(
            f"ignore={unused} match no linear layer. The modules are "
            f"{[e.module for e in entries if e.row.kind in LINEAR][:12]}."
        )
    items: list[Item] = []
    owners: dict[str, Entry] = {}
    groups = _groups(entries)
    for entry in entries:
        leaf = parameters[entry.path]
        use = chosen if chosen_entries[entry.name] else None
        if use is not None:
            _check_matrix(entry, use, leaf)
        specs = specs_of(entry, leaf, use, dtype)
        for name in specs:
            if (other := owners.setdefault(name, entry)) is not entry:
                raise ValueError(
                    f"{other.path} and {entry.path} are both the tensor {name}, one of them as a "
                    "scale. Rename the parameter."
                )
        if use is None:
            items.append(Item(entry, leaf, use, specs))
            continue
        group = groups.get(entry.name, ())
        if kept := [each.module for each in group if not chosen_entries[each.name]]:
            raise ValueError(
                f"{entry.module} is in FP8, but engines merge it with {kept}, which are not. Add "
                f"it to ignore=, or export all of them in FP8: ignore=({entry.module!r},)."
            )
        order = [rows.index(each.row) for each in group]
        whole = bool(order) and rows.index(entry.row) < max(order)
        _check_split(entry, use, tensor_parallel, whole=whole, group=group)
        peers = tuple((e, parameters[e.path]) for e in group)
        if use.cells == "tensor":
            _check_shared(entry, leaf, peers, use)
        scale = _input_scale(entry, state) if use.static_inputs else None
        items.append(Item(entry, leaf, use, specs, peers, scale))
    kept = [e.module for e in entries if e.row.kind in LINEAR and not chosen_entries[e.name]]
    # Loaders would also look for scales of experts that are one tensor, as those of gpt-oss,
    kept += [e.module for e in entries if e.row.kind == "plain" and len(e.file_shape) > 2]
    # and of the head that they make of tied embeddings.
    kept += [row.module for row in rows if row.kind == "head"]
    return Plan(items, chosen, dtype, list(dict.fromkeys(kept)))


def _groups(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """For each matrix that engines merge with others: those, with itself, by its name."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry.row.merged is not None and entry.row.kind == "linear":
            key = entry.module.rpartition(".")[0], entry.row.merged
            found.setdefault(key, []).append(entry)
    return {entry.name: group for group in found.values() for entry in group}


def _check_matrix(entry: Entry, format: Format, leaf: Any) -> None:
    shape = entry.file_shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{entry.path} is the tensor {entry.name} {list(shape)}, but {format.name!r} needs a "
            "matrix [out, in]. Pass names=, with a row that says which axes are outputs and "
            'inputs: fp8.checkpoint.Row(name="attention.q.weight", path="attention/q/kernel", '
            'kind="linear", axes="(heads features) in -> in heads features").'
        )
    if not is_weight(leaf) and not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"{entry.path} is {leaf.dtype}, but a float is needed for {format.name!r}. Add its "
            f"module to ignore=: {entry.module!r}."
        )


def _check_split(
    entry: Entry, format: Format, devices: int, *, whole: bool, group: Sequence[Entry]
) -> None:
    """Raise ValueError if an engine cannot load the blocks of a matrix.

    Rules of vLLM 0.33, `validate_fp8_block_shape`, and SGLang 0.5.23, `fp8.py`. Engines merge
    matrices in the order of the rows. `whole` says that another one comes after this one, so that
    its last block must be whole.
    """
    if not isinstance(format.cells, tuple):
        return
    row, (n, k), (of_n, of_k) = entry.row, entry.file_shape, format.cells
    by_rows = devices if row.parallel == "rows" else 1
    by_columns = devices if row.parallel == "columns" else 1
    why = f"an engine splits it over {devices} devices" if by_rows * by_columns > 1 else ""
    if k % by_rows or ((by_rows > 1 or of_k == 32) and k // by_rows % of_k):
        cut = f"inputs, {k}, in blocks of {of_k}"
    elif (by_columns > 1 or whole or (row.merged and row.parallel)) and n % (by_columns * of_n):
        cut = f"outputs, {n}, in blocks of {of_n}"
        why = why or f"engines merge it with the others of {row.merged!r}"
    else:
        return
    names = {each.module.rpartition(".")[2] for each in (entry, *group)}
    ignore = tuple(f"*.{name}" if "." in entry.module else name for name in sorted(names))
    fewer = ", fewer devices (tensor_parallel=)" if by_rows * by_columns > 1 else ""
    raise ValueError(
        f"{entry.name} {[n, k]}: {why or 'the last block must be whole'}. That cuts its {cut} of "
        f"{format.name!r}. Use format='compressed-channel'{fewer}, or leave such layers in high "
        f"precision: ignore={ignore}."
    )


def _check_shared(
    entry: Entry, leaf: Any, peers: Sequence[tuple[Entry, Any]], format: Format
) -> None:
    """Raise ValueError if weights in FP8 that engines merge have scales of their own."""
    if not is_weight(leaf):
        return
    weights = [(e, each) for e, each in peers if is_weight(each)]
    scales = {float(s) for e, each in weights for s in grid_of(e, each).scales_of(each).scale.flat}
    if len(scales) > 1:
        raise ValueError(
            f"{entry.name} is merged with {[e.name for e, _ in peers]} in engines, which cast all "
            f"of them again if their scales differ, and {format.name!r} has one scale for each: "
            f"{sorted(scales)[:3]}. Use format='compressed-channel', which keeps every bit."
        )


def _input_scale(entry: Entry, state: PyTree | None) -> float:
    """The scale of the inputs of a matrix, from the quantizer state of training."""
    if state is None:
        raise FP8StateError(
            f"{entry.name}: the format has a scale for the inputs of each matrix. Pass the state "
            "of training as state=, or use a format with dynamic inputs: compressed-channel."
        )
    states = states_by_path(state)
    found = find_state(entry.path, states)
    rows = [i for i, row in enumerate(found.rows) if row.tensor == "x"]
    if len(rows) != 1:
        raise FP8StateError(
            f"{entry.path}: its state has {len(rows)} scales of x, but a file with scales of "
            "inputs needs one. Use a format with dynamic inputs, for instance compressed-tensor."
        )
    scale = found.scale[..., rows[0]]
    # Experts of a layer may share a state.
    stacked = entry.axes.stacked[: scale.ndim]
    sizes = entry.axes.sizes(entry.shape)
    if scale.shape != tuple(sizes[name] for name in stacked):
        raise FP8StateError(
            f"{entry.path}: its state stacks {list(scale.shape)} matmuls, but the row of "
            f"{entry.name} stacks {list(entry.axes.stacked)}. Pass the state of the same model."
        )
    at = [entry.at[name] for name in stacked]
    value = float(read_region(scale, tuple(slice(i, i + 1) for i in at)).reshape(()))
    if not value > 0 or not math.isfinite(value):
        raise FP8StateError(
            f"{entry.path}: the scale of x is {value}, so it is unset. Train or calibrate for a "
            "step, and pass the state after it."
        )
    return value
