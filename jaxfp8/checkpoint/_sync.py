"""`weights`: the tensors of a checkpoint one by one, for rollout engines."""

import hashlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import TypeAlias

import numpy as np

from jaxfp8._check import check_type
from jaxfp8._typing import DType, PyTree
from jaxfp8.checkpoint._formats import Format
from jaxfp8.checkpoint._plan import Names, Plan, plan_of

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
        step: tensors that did not change are then left out. A tensor counts as seen when the next
        one is asked for. So one that the loop left half-way is sent again.

    Yields:
      (name, array): NumPy arrays on the host, in dtypes of ml_dtypes for bfloat16 and FP8.

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
    for item in plan.items:
        for tensor in plan.encode(item)[1]:
            array = tensor.whole()
            if seen is None:
                yield tensor.name, array
                continue
            digest = _digest(array)
            if seen.get(tensor.name) != digest:
                yield tensor.name, array
                seen[tensor.name] = digest


def _digest(array: np.ndarray) -> bytes:
    digest = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
