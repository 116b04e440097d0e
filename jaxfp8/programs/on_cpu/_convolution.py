"""Convolutions in NumPy: the matmuls of a TPU program.

XLA for TPUs writes each matmul as a convolution. `dim_labels=bf_io->bf` is lhs [b, f] @ rhs [i, o],
and `fb_oi->bf` reads both operands transposed. A batch dimension is spatial. Holes in lhs
(`lhs_dilate`) and the stride of the window leave one matmul for each element of the batch.

A convolution is computed as one matmul for each position of the window, over the elements that are
neither padding nor holes.

References:
  XLA, xla/service/shape_inference.cc (InferConvolveShape), xla/window_util.cc and
  xla/hlo/evaluator/hlo_evaluator_typed_visitor.h (which element meets which).
"""

import itertools
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_GROUPS = re.compile(r"\b(feature|batch)_group_count=(\d+)")
_PRECISION = re.compile(r"\boperand_precision=\{(\w+),\s*(\w+)\}")


class _Dimension(NamedTuple):
    """A spatial dimension of the window."""

    size: int
    stride: int = 1
    pad: tuple[int, int] = (0, 0)
    lhs_dilate: int = 1
    rhs_dilate: int = 1
    rhs_reversal: int = 0


def convolve(lhs: np.ndarray, rhs: np.ndarray, attributes: str, dtype: Any) -> np.ndarray:
    """The convolution before it is rounded. `dtype` is the type that it is computed in.

    Args:
      lhs: in the dimensions of `dim_labels`.
      rhs: in the dimensions of `dim_labels`.
      attributes: those of the instruction, as the program prints them.
      dtype: the type of the sums.
    """
    labels = _LABELS.search(attributes)
    if labels is None:
        raise ValueError(
            "cannot run on a CPU: a convolution has no dim_labels. Pass the text as XLA prints it."
        )
    of_lhs, of_rhs, of_result = labels.groups()
    spatial = [str(d) for d in range(len(of_lhs) - 2)]
    window = _window(attributes, len(spatial))
    # To [b, f, spatial], [i, o, spatial], and back from [b, f, spatial].
    lhs = lhs.transpose([of_lhs.index(label) for label in ("b", "f", *spatial)]).astype(dtype)
    rhs = rhs.transpose([of_rhs.index(label) for label in ("i", "o", *spatial)]).astype(dtype)
    groups = {kind: int(count) for kind, count in _GROUPS.findall(attributes)}
    features, batches = groups.get("feature", 1), groups.get("batch", 1)
    # One of them is 1. Each group has its own features of the result.
    of_groups = zip(
        [part for piece in np.split(lhs, features, 1) for part in np.split(piece, batches, 0)],
        np.split(rhs, features * batches, 1),
        strict=True,
    )
    result = np.concatenate([_one_group(a, b, window) for a, b in of_groups], 1)
    return result.transpose([("b", "f", *spatial).index(label) for label in of_result])


def as_the_matrix_unit_reads(operands: list[np.ndarray], attributes: str) -> list[np.ndarray]:
    """Float32 operands in bfloat16, unless the program asks for more.

    At the default precision a TPU multiplies float32 in one pass of bfloat16. "high" and "highest"
    add up several passes. They are close to float32, so the operand is not rounded.
    """
    found = _PRECISION.search(attributes)
    precisions = found.groups() if found else ("default", "default")
    return [
        x.astype(jnp.bfloat16) if x.dtype == np.float32 and precision == "default" else x
        for x, precision in zip(operands, precisions, strict=True)
    ]


def _window(attributes: str, rank: int) -> list[_Dimension]:
    found = _WINDOW.search(attributes)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}
    columns: dict[str, list[Any]] = {
        name: [_pair(text) if name == "pad" else int(text) for text in value.split("x")]
        for name, value in fields.items()
    }
    return [
        _Dimension(**{name: column[d] for name, column in columns.items()}) for d in range(rank)
    ]


def _pair(text: str) -> tuple[int, int]:
    low, high = text.split("_")
    return int(low), int(high)


def _one_group(lhs: np.ndarray, rhs: np.ndarray, window: list[_Dimension]) -> np.ndarray:
    """lhs [b, i, spatial] * rhs [i, o, spatial] = [b, o, spatial]."""
    sizes = [_result_size(n, d) for n, d in zip(lhs.shape[2:], window, strict=True)]
    result = np.zeros((lhs.shape[0], rhs.shape[1], *sizes), lhs.dtype)
    for index, position in enumerate(itertools.product(*(range(d.size) for d in window))):
        # Which elements of the result this position of the window reaches, and from which of lhs.
        pairs = [
            _reached(n, size, d, k)
            for n, size, d, k in zip(lhs.shape[2:], sizes, window, position, strict=True)
        ]
        targets, sources = [p[0] for p in pairs], [p[1] for p in pairs]
        if all(len(target) for target in targets):
            taken = lhs[np.ix_(np.arange(lhs.shape[0]), np.arange(lhs.shape[1]), *sources)]
            weights = rhs.reshape(*rhs.shape[:2], -1)[..., index]
            where = np.ix_(np.arange(result.shape[0]), np.arange(result.shape[1]), *targets)
            result[where] += np.tensordot(weights, taken, ((0,), (1,))).swapaxes(0, 1)
    return result


def _result_size(n: int, d: _Dimension) -> int:
    padded = (n - 1) * d.lhs_dilate + 1 + sum(d.pad) if n else sum(d.pad)
    return max(0, (padded - (d.size - 1) * d.rhs_dilate - 1) // d.stride + 1)


def _reached(n: int, size: int, d: _Dimension, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the result, and for each the index of lhs, at the position k of rhs."""
    k = d.size - 1 - k if d.rhs_reversal else k
    index = np.arange(size)
    place = index * d.stride + k * d.rhs_dilate - d.pad[0]
    inside = (place >= 0) & (place % d.lhs_dilate == 0) & (place // d.lhs_dilate < n)
    return index[inside], place[inside] // d.lhs_dilate
