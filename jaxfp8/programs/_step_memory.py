"""The memory of a compiled train step beside its arguments: gradients, residuals, and the rest."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from jaxfp8.programs._buffers import buffers_of
from jaxfp8.programs._storage import Buffer, Memory


class StepMemory(NamedTuple):
    """Bytes of a program on one device. They add up to what XLA allocates, without code.

    Attributes:
      arguments: of all arguments that the program reads or returns.
      gradients: of gradients of weights, as results or at the peak.
      residuals: of what the forward pass left for the backward pass, at the peak.
      temporaries: the rest of XLA's temporary memory.
      results: of other results, if they do not take the memory of donated arguments.
    """

    arguments: int
    gradients: int
    residuals: int
    temporaries: int
    results: int


def step_memory(compiled: Any, weight_sizes: Collection[int]) -> StepMemory:
    """The memory of a compiled train step.

    The peak is the moment at which most temporary bytes are live. A buffer is a residual if the
    forward pass writes it and the backward pass reads it. It is a gradient if the backward pass
    writes it, the optimizer reads it, and it has as many elements as a weight. A sum of gradients
    over microbatches is one, too. Everything else is a temporary: activations and their gradients
    while a layer runs, workspaces of matmuls, and gaps between buffers.

    XLA may put a temporary into the memory of a result or of a donated argument, which is not in
    use at that moment. Then it counts there.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns.
      weight_sizes: the numbers of elements of the weights, of whole arrays and of shards.

    Raises:
      ValueError: if XLA does not tell the program's memory.

    Example:
      >>> import jax.numpy as jnp
      >>> step = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(w) ** 2)))
      >>> step_memory(step.lower(jnp.ones(64)).compile(), {64}).gradients
      256
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(
            f"{jax.default_backend()} does not tell the memory of a compiled program. Compile the "
            "step for a CPU or for an NVIDIA GPU."
        )
    memory = buffers_of(compiled.as_text())
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    returned = sum(b.bytes for b in memory.results if _is_gradient(b, weight_sizes))
    residuals, gradients = _at_peak(memory, weight_sizes)
    # What does not fit lies in memory of results or arguments, see above.
    returned = min(returned, results)
    residuals = min(residuals, stats.temp_size_in_bytes)
    gradients = min(gradients, stats.temp_size_in_bytes - residuals)
    return StepMemory(
        stats.argument_size_in_bytes,
        returned + gradients,
        residuals,
        stats.temp_size_in_bytes - residuals - gradients,
        results - returned,
    )


def _at_peak(memory: Memory, weight_sizes: Collection[int]) -> tuple[int, int]:
    """Bytes of residuals and gradients at the peak."""
    live = memory.live(memory.peak)
    residuals = [b for b in live if _is_residual(b)]
    gradients = [b for b in live if not _is_residual(b) and _is_gradient(b, weight_sizes)]
    return sum(b.bytes for b in residuals), sum(b.bytes for b in gradients)


def _is_residual(buffer: Buffer) -> bool:
    return (
        "forward" in buffer.makers
        and "backward" not in buffer.makers
        and "backward" in buffer.readers
    )


def _is_gradient(buffer: Buffer, weight_sizes: Collection[int]) -> bool:
    return (
        ("backward" in buffer.makers or buffer.summed)
        and "forward" not in buffer.makers
        and "other" in buffer.readers
        and buffer.elements in weight_sizes
    )
