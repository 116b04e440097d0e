"""`collect`: watch casts and sums of the steps that run inside a context, as rows by layer."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx

from jaxfp8._check import check_bool
from jaxfp8._typing import Matmul, Tensor
from jaxfp8.matmul._stats import Accumulation, CastStats, Stats, SumStats, watch_casts
from jaxfp8.nnx._dot_general import AbstractFP8Matmul

# Names of layers: the path of a matmul or of its state, without the parts that say nothing.

# The plugs of layers, as linen numbers them and as nnx names their attributes.
_PLUGS = ("FP8DotGeneral_0", "FP8EinsumOp_0", "dot_general", "einsum_op")
_TOP = "matmul"


def layer_name(path: Iterable[Any]) -> str:
    """The name of a layer from the path of its matmul."""
    parts = [str(part) for part in path]
    if parts and parts[-1] in _PLUGS:
        parts.pop()
    return "/".join(parts) or _TOP


@contextlib.contextmanager
def _named_matmuls(model: Any) -> Iterator[None]:
    """Give each FP8 matmul of an nnx model its path as a name, until the context ends.

    None stands for other models, which need no names. TypeError for what is no nnx module.
    """
    if model is not None and not isinstance(model, nnx.Module):
        raise TypeError(
            f"model is of type {type(model).__name__}, but collect(model) takes an nnx module. "
            "Layers of linen know their names. Write collect()."
        )
    nodes = () if model is None else nnx.iter_graph(model)
    matmuls = [(path, node) for path, node in nodes if isinstance(node, AbstractFP8Matmul)]
    before = [matmul.name for _, matmul in matmuls]
    for path, matmul in matmuls:
        matmul.name = "/".join(map(str, path))
    try:
        yield
    finally:
        for (_, matmul), name in zip(matmuls, before, strict=True):
            matmul.name = name


# Rows of cast statistics: all records of one copy of a tensor as one row.

_SMALLEST_E8M0 = 2.0**-127  # subnormal in float32, so XLA may send 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastRow:
    """What the casts of one copy of a tensor lost, over all records of it.

    Here x is the tensor before a cast, s its scale, and `x ~ stored * s`.

    Attributes:
      layer: the name of the layer.
      tensor: "x", "w" or "g", the gradient of the layer's result.
      matmuls: the matmuls that read the copy: "fprop", "dgrad", "wgrad".
      amax: `max |x|`; inf if a value is not finite.
      scale_min: the smallest s; NaN if no s counts. An s does not count if all its values are zero,
        or if it is NaN. (With inf or NaN in its values, an E8M0 scale is NaN, and a float32 scale
        that is not stored is 1.)
      scale_max: the largest s.
      saturated: `count(|x| > L * s) / values`. L is the largest value of the format plus half of
        the spacing there: 464 for E4M3, 61440 for E5M2. Below L the clip loses no more than
        rounding does.
      underflowed: `count(x != 0 and stored == 0) / count(x != 0)`. A magnitude below 2^-126 counts
        as 0.
      nonfinite: the number of values that are inf or NaN.
      values: the number of values, summed over all records.
      calls: the number of records. Each call gives one on each device of a `jax.shard_map`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, recipe = jnp.array([[1e6, 1.0, 0.0]]), fp8.recipes.current()
      >>> with fp8.diagnostics.collect() as records:
      ...     _ = fp8.dot(x, jnp.ones((3, 2)), recipe=recipe, name="up")
      >>> row = fp8.diagnostics.summary(records).rows[0]
      >>> row.layer, row.tensor, row.amax, row.saturated, row.underflowed
      ('up', 'x', 1000000.0, 0.0, 0.5)
    """

    layer: str
    tensor: Tensor
    matmuls: tuple[Matmul, ...]
    key: str = dataclasses.field(repr=False)
    amax: float
    scale_min: float
    scale_max: float
    saturated: float
    underflowed: float
    nonfinite: int
    values: int
    calls: int


_Records = list[tuple[str, Stats]]


def _cast_rows(records: _Records) -> list[CastRow]:
    """One row for each layer, tensor and copy, sorted by them."""
    found: dict[tuple[str, Tensor, tuple[Matmul, ...]], list[CastStats]] = {}
    for layer, each in records:
        if isinstance(each, CastStats):
            found.setdefault((layer, each.tensor, each.matmuls), []).append(each)
    order = sorted(found, key=lambda key: (_natural(key[0]), "xwg".index(key[1]), key[2]))
    return [_row(*key, found[key]) for key in order]


def _row(
    layer: str, tensor: Tensor, matmuls: tuple[Matmul, ...], records: list[CastStats]
) -> CastRow:
    def all_of(field: str) -> np.ndarray:
        return np.array([np.asarray(getattr(each, field), np.float64) for each in records])

    def total(field: str) -> int:
        return int(all_of(field).sum())

    values, nonzero = total("values"), total("nonzero")
    smallest, largest = float(all_of("scale_min").min()), float(all_of("scale_max").max())
    has_scale = largest >= 0
    return CastRow(
        layer=layer,
        tensor=tensor,
        matmuls=matmuls,
        # Two matmuls read each tensor.
        key=tensor if len(matmuls) == 2 else f"{tensor}/{matmuls[0]}",
        amax=float(all_of("amax").max()),
        scale_min=(smallest or _SMALLEST_E8M0) if has_scale else np.nan,
        scale_max=(largest or _SMALLEST_E8M0) if has_scale else np.nan,
        saturated=total("saturated") / max(values, 1),
        underflowed=total("underflowed") / max(nonzero, 1),
        nonfinite=total("nonfinite"),
        values=values,
        calls=len(records),
    )


# Rows of sums: all records of one matmul of a layer as one row.

_MATMULS: tuple[Matmul, ...] = get_args(Matmul)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumRow:
    """What Hopper's tensor cores would lose of the sums of one matmul, over all records of it.

    Here y are sums of products of FP8 values, exact, and z the same sums with fewer bits. Each
    record has a sample of y with all of K: at most 64 rows and 64 columns, evenly spaced. The model
    of the tensor cores computes z, on every chip. Each figure is the largest of all records.

    Without tiles, y is not scaled: scales of tensors and rows multiply whole sums. With tiles, the
    sum of each tile is multiplied by its scales. "Exact" is float32, with an error below
    1e-6 for K up to 65536.

    Attributes:
      layer: the name of the layer.
      matmul: "fprop", "dgrad" or "wgrad".
      k: the length of a sum, on one device inside `jax.shard_map`.
      one_sign: `sum |y| / sum of |products|`. It is 1 if all products of a sum have one sign, and
        small if they cancel.
      in_use: how this matmul accumulates, "fast" or "promoted". `precision=` decides it for fprop.
      fast: `|z - y| / |y|` in the Frobenius norm, for sums that stay in the tensor cores. NaN for
        operands in tiles, whose sums cannot stay there.
      promoted: the same for sums that leave the tensor cores after each 128 values of K, or after
        each tile if it is smaller, and are added in float32.
      outputs: the number of sums in the samples of all records.
      calls: the number of records. Each call gives one on each device of a `jax.shard_map`.

    Figures are NaN if a sum is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, w = jnp.linspace(0, 1, 4096)[None], jnp.ones((4096, 8))
      >>> with fp8.diagnostics.collect(sums=True) as records:
      ...     _ = fp8.dot(x, w, recipe=fp8.recipes.current(), name="up")
      >>> (row,) = fp8.diagnostics.summary(records).sums
      >>> row.matmul, row.k, row.one_sign, row.in_use, row.fast > 0.05, row.promoted < 0.001
      ('fprop', 4096, 1.0, 'fast', True, True)

    References:
      MMA-Sim, arXiv:2511.10909, has the model. DeepSeek-V3, arXiv:2412.19437, section 3.3.2, has
      promotion.
    """

    layer: str
    matmul: Matmul
    k: int
    one_sign: float
    in_use: Accumulation
    fast: float
    promoted: float
    outputs: int
    calls: int

    @property
    def key(self) -> str:
        return self.matmul


def _sum_rows(records: _Records) -> list[SumRow]:
    """One row for each layer and matmul, sorted by them."""
    found: dict[tuple[str, Matmul], list[SumStats]] = {}
    for layer, each in records:
        if isinstance(each, SumStats):
            found.setdefault((layer, each.matmuls[0]), []).append(each)
    order = sorted(found, key=lambda key: (_natural(key[0]), _MATMULS.index(key[1])))
    return [_sum_row(*key, found[key]) for key in order]


def _sum_row(layer: str, matmul: Matmul, records: list[SumStats]) -> SumRow:
    def largest(field: str, of: list[SumStats] = records) -> float:
        return float(np.max([np.asarray(getattr(each, field)) for each in of]))

    # The figure of "fast" is that of calls which are fast, if there are some. Others must not
    # mark the row, and tiles, which have no such figure, must not hide it.
    fast = [each for each in records if each.in_use == "fast"]
    return SumRow(
        layer=layer,
        matmul=matmul,
        k=max(each.k for each in records),
        one_sign=largest("one_sign"),
        in_use="fast" if fast else "promoted",
        fast=largest("fast", fast or records),
        promoted=largest("promoted"),
        outputs=sum(each.outputs for each in records),
        calls=len(records),
    )


def _natural(name: str) -> list[str | int]:
    """A key for sorting in which numbers are ordered by value: layer 2 before layer 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


# The context, and the records that it collects.


class Records:
    """The statistics of all casts and sums that ran inside `fp8.diagnostics.collect`.

    `fp8.diagnostics.summary(records)` makes a table of them.

    Example:
      >>> Records().rows()
      []
    """

    def __init__(self) -> None:
        self._records: list[tuple[str, tuple[Stats, ...]]] = []

    def receive(self, layer: str, statistics: tuple[Stats, ...]) -> None:
        """Add the statistics of one call of a matmul. JAX calls it on another thread.

        Example:
          >>> records = Records()
          >>> records.receive("up", ())
        """
        self._records.append((layer, statistics))

    def rows(self) -> list[CastRow]:
        """One row for each layer, tensor and copy. It waits for programs that still run."""
        return _cast_rows(self._all())

    def sums(self) -> list[SumRow]:
        """One row for each layer and matmul, with `collect(sums=True)`. It waits, as `rows`.

        Example:
          >>> Records().sums()
          []
        """
        return _sum_rows(self._all())

    def _all(self) -> _Records:
        jax.effects_barrier()
        return [
            (layer_name(path.split("/")), each)
            for path, statistics in list(self._records)
            for each in statistics
        ]

    def __len__(self) -> int:
        return len(self._records)


@contextlib.contextmanager
def collect(model: Any = None, *, sums: bool = False) -> Iterator[Records]:
    """Watch the casts of all FP8 matmuls that run in this context, and their sums if you like.

    A step that runs here sends, for each cast, its scale, its amax and the values that it lost.
    `jax.jit` compiles the step once for this context, and keeps the program for the next time.
    Outside of the context nothing changes: the same programs run, without another compilation.

    A record has the name of its layer: the path of a layer of linen, the path in `model` for nnx,
    or `name=` of `fp8.dot`, `dot_general` and `einsum`. A call without a name has its file and its
    line. Calls of one name are one row, for instance the iterations of a scan over layers.

    A matmul that is differentiated is recorded in its backward pass, so once for each step, also
    with `jax.checkpoint`. Inside `jax.shard_map` each device records its own shards.

    Args:
      model: an nnx module, whose FP8 layers are named by their paths in it while the context is
        active. Pass the model that the step gets.
      sums: whether each matmul also sends what Hopper's tensor cores would lose of its sums, see
        `SumRow`. It computes a sample of at most 64 x 64 sums once more, with all of K, on any
        chip. Grouped matmuls (experts) send their casts only. `jax.jit` compiles the step once for
        each value of `sums`.

    Yields:
      The records, for `fp8.diagnostics.summary`.

    Raises:
      RuntimeError: if no FP8 cast was recorded, or if another `collect` is active.
      TypeError: if `model` is no nnx module, or `sums` no bool.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> @jax.jit
      ... def step(w, x):
      ...     loss = lambda w: fp8.dot(x, w, recipe=fp8.recipes.current(), name="up").sum()
      ...     return jax.grad(loss)(w)
      >>> with fp8.diagnostics.collect() as records:
      ...     _ = step(jnp.ones((8, 4)), jnp.ones((2, 8)))
      >>> print(fp8.diagnostics.summary(records))
      layer  tensor  amax  scale               saturated  underflowed  nonfinite  values  calls
      up     x       1     0.00223             0          0            0          16      1
      up     w       1     0.00223             0          0            0          32      1
      up     g       1     1.74e-05            0          0            0          8       1
      act above 0.1 % saturated, 2 % underflowed (marked !)
    """
    check_bool("sums", sums)
    records = Records()
    with _named_matmuls(model), watch_casts(records.receive, sums=sums):
        yield records
    if not len(records):
        raise RuntimeError(
            "no FP8 cast was recorded in fp8.diagnostics.collect(). Run a step inside the context. "
            "A function that was compiled ahead of time (lower().compile()) or exported before "
            "does not report: call the function of jax.jit. Matmuls with recipes.identity() cast "
            "nothing, and a matmul whose result gets no gradient is not recorded under jax.grad."
        )
