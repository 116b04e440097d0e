"""The cast in Pallas (Mosaic GPU), for Hopper and Blackwell.

It reads x once for all copies and its amax. XLA reads x once for a cast and an amax, but a second
time for a transposed copy.

Letters: L the leading axes as one, M, K the last two; T = 128.
"""

from collections.abc import Sequence

from jaxfp8._quantized_tensor import Cast, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.kernels.cast._mosaic_kernel import CopiesKernel
from jaxfp8.kernels.mosaic._source import lined, operands_of, reader
from jaxfp8.kernels.mosaic._sums import ColumnSums
from jaxfp8.kernels.mosaic._tiles import T, tiles_of
from jaxfp8.prologues._prologue import Source, prologue_of


def cast_copies(
    x: Source, cast: Cast, scales: Sequence[tuple[Array, Array]], *, key: Array | None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `kernels.cast._api.cast_copies`.

    Raises:
      NotImplementedError: for tiles, for stochastic rounding, and for all that `copies` names.
    """
    del key
    if cast.rounding != "nearest" or any(each.in_tiles for each in cast.granularities):
        raise NotImplementedError(
            f"The cast has granularities={cast.granularities!r} and rounding={cast.rounding!r}. "
            "This kernel needs scales that are not in tiles, and rounding='nearest'. Write "
            "casts='xla' in fp8.Kernels."
        )
    multipliers, known = zip(*scales, strict=True)
    values, extras = copies(x, cast, multipliers)
    return cast.copies(values, known, x.dtype), extras


def copies(
    x: Source, cast: Cast, multipliers: tuple[Array, ...]
) -> tuple[tuple[Array, ...], CastExtras]:
    """The values of each copy of x, and the amax of each tile T x T of x, in one read of x.

    A copy is written transposed if its direction says so. It is also written transposed if it has a
    multiplier for each column, because a matmul then contracts it along M.

    Args:
      x: [..., M, K].
      cast: which copies.
      multipliers: one array for each copy, of shape [] or with the axes of x. An axis may have size
        1. Axis K must have size 1; if the copy is transposed, axis M must.

    Raises:
      NotImplementedError: for any of these:

        - x is float64, or its last two axes are no multiples of 32;
        - a transposed copy has a multiplier for each row, or another copy has one for each column;
        - some axes of the mesh are manual and others are not;
        - jax is older than 0.11.
    """
    operands, prologue = operands_of(x), prologue_of(x)
    transposed = tuple(
        each.transposed or each.granularity.has_cells_along(-1, x.ndim) for each in cast.directions
    )
    multipliers = tuple(
        each.reshape((1,) * x.ndim) if each.ndim == 0 else each for each in multipliers
    )
    for multiplier, is_transposed in zip(multipliers, transposed, strict=True):
        if multiplier.shape[-2 if is_transposed else -1] > 1:
            raise NotImplementedError(
                f"The multipliers are {list(multiplier.shape)}, x is {list(x.shape)}, and "
                f"transposed={is_transposed}. A copy needs one multiplier for each of its rows, or "
                "fewer. Write casts='xla' in fp8.Kernels."
            )

    def local(*arrays: Array) -> tuple[Array, ...]:
        x, multipliers = arrays[0], arrays[len(operands) :]
        # Matrices with different multipliers of columns stay separate. Otherwise the tokens of all
        # matrices become rows of one matrix.
        separate = cast.separate or any(
            each.shape[-2] == 1 and each.size > each.shape[-1] for each in multipliers
        )
        source, read = reader(arrays[: len(operands)], prologue, separate=separate)
        lines = [lined(each, x.shape, source.shape[0]) for each in multipliers]
        kernel = CopiesKernel(
            source=source,
            format=cast.format,
            transposed=transposed,
            in_lines=tuple(each.ndim > 1 for each in lines),
            sums=ColumnSums(source.shape, T) if cast.column_sums else None,
        )
        written = kernel(read, lines)
        values = [
            each.swapaxes(1, 2) if is_transposed else each
            for each, is_transposed in zip(written.copies, transposed, strict=True)
        ]
        sums = [] if kernel.sums is None else [kernel.sums.shaped(written.sums, x.shape)]
        tiles = *x.shape[:-2], *tiles_of(x.shape)
        return *(each.reshape(x.shape) for each in values), written.largest.reshape(tiles), *sums

    # The kernel returns one amax for each T x T, so each shard must have whole tiles.
    cells = *[(1, 1)] * len(transposed), (T, T), *[(T, 1)] * cast.column_sums
    results = on_mesh(local, (T, T), cells)(*operands, *multipliers)
    return results[: len(transposed)], CastExtras(*results[len(transposed) :])
