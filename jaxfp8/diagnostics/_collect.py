"""`collect`: watch the casts of the steps that run inside a context."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxfp8.diagnostics._cast_rows import CastRow, cast_rows
from jaxfp8.diagnostics._names import named_matmuls
from jaxfp8.ops._cast_stats import CastStats
from jaxfp8.ops._watch import watching


class Records:
    """The statistics of all casts that ran inside `fp8.diagnostics.collect`.

    `fp8.diagnostics.summary(records)` makes a table of them.

    Example:
      >>> Records().rows()
      []
    """

    def __init__(self) -> None:
        self._records: list[tuple[str, tuple[CastStats, ...]]] = []

    def receive(self, layer: str, statistics: tuple[CastStats, ...]) -> None:
        """Add the statistics of one call of a matmul. JAX calls it on another thread.

        Example:
          >>> records = Records()
          >>> records.receive("up", ())
        """
        self._records.append((layer, statistics))

    def rows(self) -> list[CastRow]:
        """One row for each layer, tensor and copy. It waits for programs that still run."""
        jax.effects_barrier()
        return cast_rows(list(self._records))

    def __len__(self) -> int:
        return len(self._records)


@contextlib.contextmanager
def collect(model: Any = None) -> Iterator[Records]:
    """Watch the casts of all FP8 matmuls that run in this context.

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

    Yields:
      The records, for `fp8.diagnostics.summary`.

    Raises:
      RuntimeError: if no FP8 cast was recorded, or if another `collect` is active.
      TypeError: if `model` is no nnx module.

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
    records = Records()
    with named_matmuls(model), watching(records.receive):
        yield records
    if not len(records):
        raise RuntimeError(
            "no FP8 cast was recorded in fp8.diagnostics.collect(). Run a step inside the context. "
            "A function that was compiled ahead of time (lower().compile()) or exported before "
            "does not report: call the function of jax.jit. Matmuls with recipes.identity() cast "
            "nothing, and a matmul whose result gets no gradient is not recorded under jax.grad."
        )
