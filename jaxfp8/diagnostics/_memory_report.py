"""`memory_report`: what fills the memory of a train step, also in high precision."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import flax.nnx.transforms.compilation as nnx_stages
import jax
from rich.table import Table

from jaxfp8._table import align, rich_table
from jaxfp8._typing import PyTree
from jaxfp8.diagnostics._arguments import ArgumentKind, arguments_of_twin, kinds_of
from jaxfp8.programs._memory import step_memory
from jaxfp8.state._state import is_node
from jaxfp8.state._value_and_grad import high_precision

# `MemoryReport`: the bytes of a train step by kind, in FP8 and in high precision.

MemoryKind = Literal[
    "weights", "master weights", "moments", "quantizer state", "other arguments",
    "gradients", "residuals", "temporaries", "results", "total",
]  # fmt: skip
_MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)

# Powers of 1024. The table uses the largest unit that leaves the total at 1 or more.
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One kind of memory.

    Attributes:
      kind: what the bytes hold.
      fp8: bytes of the step.
      twin: bytes of the step in high precision; None if it was not compiled.
    """

    kind: MemoryKind
    fp8: int
    twin: int | None

    @property
    def ratio(self) -> float | None:
        """`fp8 / twin`. None without bytes in the twin.

        Example:
          >>> MemoryRow("residuals", 50, 100).ratio
          0.5
        """
        return self.fp8 / self.twin if self.twin else None


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of a compiled train step on one device. `print` and `rich.print` show a table.

    Attributes:
      fp8: the bytes of each kind in the step.
      twin: those of the same step with matmuls in high precision; None if it was not compiled.

    Example:
      >>> report = MemoryReport({"weights": 2 * 2**20, "residuals": 2**20}, {"residuals": 2**21})
      >>> print(report)
      kind       FP8 (MiB)  high precision (MiB)  ratio
      weights         2.00                  0.00
      residuals       1.00                  2.00  0.50
      total           3.00                  2.00  1.50
    """

    fp8: Mapping[MemoryKind, int]
    twin: Mapping[MemoryKind, int] | None = None

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        """A row for each kind that has bytes, and the total."""

        def in_order(side: Mapping[MemoryKind, int]) -> list[int]:
            return [*(side.get(kind, 0) for kind in _MEMORY_KINDS[:-1]), sum(side.values())]

        nothing: Sequence[int | None] = [None] * len(_MEMORY_KINDS)
        twin = nothing if self.twin is None else in_order(self.twin)
        found = map(MemoryRow, _MEMORY_KINDS, in_order(self.fp8), twin)
        return tuple(row for row in found if row.fp8 or row.twin or row.kind == "total")

    def to_dict(self) -> dict[str, int]:
        """The bytes of all rows: `{"fp8/weights": ..., "high_precision/weights": ...}`.

        Example:
          >>> MemoryReport({"weights": 8}).to_dict()
          {'fp8/weights': 8, 'fp8/total': 8}
        """
        found = {f"fp8/{row.kind.replace(' ', '_')}": row.fp8 for row in self.rows}
        for row in self.rows:
            if row.twin is not None:
                found[f"high_precision/{row.kind.replace(' ', '_')}"] = row.twin
        return found

    def __str__(self) -> str:
        return align(self._cells(), right=range(1, 4))

    def __rich__(self) -> Table:
        """The table for rich, which calls this method."""
        return rich_table(self._cells(), right=range(1, 4))

    def _cells(self) -> list[list[str]]:
        largest = max(self.rows[-1].fp8, self.rows[-1].twin or 0)
        power = min(max(largest.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        unit = _UNITS[power]
        cells = [["kind", f"FP8 ({unit})", f"high precision ({unit})", "ratio"]]
        for row in self.rows:
            numbers = (row.fp8, row.twin or 0)
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            cells.append([row.kind, *(_number(n / 1024**power, power) for n in numbers), ratio])
        return [line if self.twin is not None else line[:2] for line in cells]


def _number(value: float, power: int) -> str:
    if not power:
        return f"{value:,.0f}"
    return "<0.01" if 0 < value < 0.005 else f"{value:,.2f}"


# The report on a step: its program, its arguments, and its high-precision twin.

_POINTER = 8  # bytes. XLA's results have a table of pointers.


def memory_report(
    step: Callable[..., Any],
    *args: Any,
    argument_kinds: Sequence[PyTree] | None = None,
    twin: bool | tuple[Callable[..., Any], Sequence[Any]] = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> MemoryReport:
    """The bytes of a train step on one device by kind, beside those of the step in high precision.

    It compiles the step, and runs nothing.

    | kind | what it is |
    |---|---|
    | weights | parameters |
    | master weights | those of `fp8.optim.with_master_weights` |
    | moments | the rest of the optimizer state |
    | quantizer state | scales and amaxes that a recipe keeps between steps |
    | other arguments | the batch, keys, statistics of batch norms |
    | gradients | gradients of weights, between the backward pass and the optimizer |
    | residuals | what the forward pass leaves for the backward pass |
    | temporaries | the rest of XLA's temporary memory |
    | results | what the step returns, if it takes no memory of a donated argument |

    Gradients and residuals are counted at the moment at which most temporary bytes are live. The
    sum of all kinds is the memory that XLA allocates for the program.

    Limits:

    - XLA for CPUs widens FP8 values before a matmul, often for the whole step. So the report for a
      CPU shows larger residuals than a GPU has. Give types on a GPU's topology to compile for it.
    - FP8 copies of weights for the backward pass are residuals, too.
    - The optimizer may read a gradient in the operation that makes it. Such a gradient takes no
      memory, and is not counted.
    - `fp8.save_fp8_residuals` saves nothing in the twin, which has no FP8 residuals.
    - An argument that the program does not read is not counted. Memory of the host is not, either.
    - A step without donated arguments holds old and new weights. The new ones are results.

    Args:
      step: the train step. A `jax.jit` or an `nnx.jit` of it keeps its options: donated and static
        arguments, shardings. Other functions are compiled by `jax.jit`.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s. Types may have shardings over devices
        that are not there.
      argument_kinds: for each argument that is not static, its kind, a tree of kinds, or None.
        In a tree with the nodes of the argument, a kind stands for all arrays below it.
        Kinds are the first five of the table, and "gradients". By default, and for None, the kind
        is found: states of matmuls, of optax and of jaxfp8, a train state, `{"params": ...}`, and
        Variables of nnx tell it. Without any of these, weights are the only tree that the step
        takes and returns.
      twin: whether to compile the step in high precision, too. Or `(step, args)` of another step to
        compare with, which is compiled as it is. Its kinds are found.
      compiler_options: as in `jax.stages.Lowered.compile`, for both.

    Returns:
      The report. The twin has no quantizer state. Its FP8 weights are arrays of their own dtype.

    Raises:
      ValueError: if `argument_kinds` does not fit, or the weights are not found. Also if two
        modules in an `nnx.jit` share Variables.
      TypeError: if `twin` is none of these.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.delayed()
      >>> def loss_fn(w, state, x):
      ...     return fp8.dot(x, w, recipe=recipe, state=state).sum()
      >>> @jax.jit
      ... def step(w, state, x):
      ...     loss, grads, state = fp8.value_and_grad(loss_fn)(w, state, x)
      ...     return w - 0.1 * grads, state
      >>> w, x = jnp.ones((64, 32)), jnp.ones((8, 64))
      >>> report = memory_report(step, w, fp8.init_state(recipe), x)
      >>> [(row.kind, row.fp8, row.twin) for row in report.rows[:3]]
      [('weights', 8192, 8192), ('quantizer state', 228, 0), ('other arguments', 2048, 2048)]
    """
    is_pair = isinstance(twin, tuple) and len(twin) == 2 and callable(twin[0])
    if not isinstance(twin, bool) and not is_pair:
        raise TypeError(f"twin={twin!r} must be True, False, or a pair (step, args).")
    mine = _bytes_of(step, args, argument_kinds, compiler_options)
    if twin is False:
        return MemoryReport(mine)
    if twin is not True:
        return MemoryReport(mine, _bytes_of(*twin, None, compiler_options))
    try:
        with high_precision():
            args = arguments_of_twin(args)
            other = _bytes_of(step, args, argument_kinds, compiler_options, count_state=False)
    except Exception as error:
        error.add_note(
            "jaxfp8: this happened while fp8.memory_report compiled the step in high "
            "precision. Pass twin=(step, args) for another step, or twin=False for none."
        )
        raise
    return MemoryReport(mine, other)


def _bytes_of(
    step: Any,
    args: Sequence[Any],
    named: Sequence[PyTree] | None,
    options: Mapping[str, Any] | None,
    count_state: bool = True,
) -> dict[MemoryKind, int]:
    """The bytes of each kind in a step."""
    jitted: Any = step if callable(getattr(step, "lower", None)) else jax.jit(step)
    lowered = jitted.lower(*args)
    if isinstance(lowered, nnx_stages.Lowered):
        lowered = lowered.lowered
    kinds = kinds_of(args, lowered.args_info[0], lowered.out_info, named)
    compiled = lowered.compile(compiler_options=dict(options or {}))
    infos = jax.tree.leaves(lowered.args_info)
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)

    found: dict[MemoryKind, int] = dict.fromkeys(_MEMORY_KINDS[:-1], 0)
    weight_sizes: set[int] = set()  # numbers of elements, of whole arrays and of shards
    for kind, info, sharding in zip(kinds, infos, shardings, strict=True):
        if sharding is None:  # the program does not use it
            continue
        shard = math.prod(sharding.shard_shape(info.shape))
        found[kind] += shard * info.dtype.itemsize
        if kind == "weights":
            weight_sizes |= {math.prod(info.shape), shard}
    memory = step_memory(compiled, weight_sizes)
    # With constants that jit moved out of the function.
    others = set(get_args(ArgumentKind)) - {"other arguments"}
    found["other arguments"] = memory.arguments - sum(found[kind] for kind in others)
    found["gradients"] += memory.gradients
    found["residuals"] = memory.residuals
    found["temporaries"] = memory.temporaries
    found["results"] = memory.results
    if not count_state:
        donated = [i.donated for k, i in zip(kinds, infos, strict=True) if k == "quantizer state"]
        results = jax.tree.leaves(lowered.out_info, is_leaf=is_node)
        leaves = jax.tree.leaves([node for node in results if is_node(node)])
        if not all(donated):
            found["results"] -= sum(x.size * x.dtype.itemsize for x in leaves)
        found["results"] -= _POINTER * len(leaves)
        found["quantizer state"] = 0
    return found
