"""`weights`: the tensors of a checkpoint one by one, for rollout engines."""

import hashlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import TypeAlias

import numpy as np

from jaxfp8._check import check_type
from jaxfp8._typing import DType, PyTree
from jaxfp8.checkpoint._formats import Format
from jaxfp8.checkpoint._layouts import Names
from jaxfp8.checkpoint._plan import Item, Plan, plan_of

Seen: TypeAlias = MutableMapping[str, bytes]


def weights(
    params: PyTree,
    format: str | Format | None,
    *,
    names: Names = None,
    ignore: Sequence[str] = (),
    dtype: DType | None = None,
    state: PyTree | None = None,
    tensor_parallel: int = 1,
    seen: Seen | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that `export` would write, one by one: for the weights of a rollout engine.

    A tensor is made when it is asked for, so one tensor is in memory twice. Names, dtypes, shapes
    and bytes are those of the file.

    Args:
      params: see `export`, as for all arguments but the last.
      format: the format of the file.
      names: the rows of tensors.
      ignore: patterns of modules in high precision.
      dtype: of parameters in high precision.
      state: quantizer state, for scales of inputs.
      tensor_parallel: over how many devices the engine splits matrices.
      seen: a dict, empty at first. It gets a digest of each tensor. Pass it again after the next
        step: modules of which no tensor changed are then left out. Matrices that engines merge are
        one module, and so are all experts of a layer, because an engine makes a module anew from
        what arrives. A tensor counts as seen when the next one is asked for. So one that the loop
        left half-way is sent again.

    Yields:
      (name, array): NumPy arrays on the host, in dtypes of ml_dtypes for bfloat16 and FP8. Without
      `seen` they come in the order of the parameters, and else the tensors of a module together.

    Raises:
      TypeError, ValueError, FP8StateError: as `export`, before the first tensor.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> params, seen = {"up": {"kernel": jnp.ones((256, 128))}}, {}
      >>> for name, array in fp8.checkpoint.weights(params, "hf-fp8", seen=seen):
      ...     print(name, array.dtype, array.shape)
      up.weight float8_e4m3fn (128, 256)
      up.weight_scale_inv float32 (1, 2)
      >>> list(fp8.checkpoint.weights(params, "hf-fp8", seen=seen))
      []
    """
    check_type("seen", seen, MutableMapping | None, "a dict, or None")
    plan = plan_of(
        params, format, names, ignore=ignore, dtype=dtype, state=state,
        tensor_parallel=tensor_parallel,
    )  # fmt: skip
    return _changed(plan, seen)


def _changed(plan: Plan, seen: Seen | None) -> Iterator[tuple[str, np.ndarray]]:
    if seen is None:
        for item in plan.items:
            for tensor in plan.encode(item)[1]:
                yield tensor.name, tensor.whole()
        return
    for items in _modules(plan):
        same: list[Item] = []  # before the first tensor of the module that changed
        is_changed = False
        for item in items:
            tensors = plan.encode(item)[1]
            if not is_changed:
                if all(seen.get(each.name) == _digest(each.whole()) for each in tensors):
                    same.append(item)
                    continue
                is_changed = True
                # If the loop ends within the module, the next call sends all of it again.
                for name in (name for each in items for name in each.specs):
                    seen.pop(name, None)
                tensors = [t for each in same for t in plan.encode(each)[1]] + tensors
            for tensor in tensors:
                array = tensor.whole()
                yield tensor.name, array
                seen[tensor.name] = _digest(array)


def _modules(plan: Plan) -> list[list[Item]]:
    """The items of each module of an engine."""
    merged = {
        item.entry.module: f"{item.entry.module.rpartition('.')[0]}.{item.entry.row.merged}"
        for item in plan.items
        if item.entry.row.merged
    }
    found: dict[str, list[Item]] = {}
    for item in plan.items:
        module = item.entry.module
        before, experts, _ = f"{module}.".partition(".experts.")
        found.setdefault(before if experts else merged.get(module, module), []).append(item)
    return list(found.values())


def _digest(array: np.ndarray) -> bytes:
    digest = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
