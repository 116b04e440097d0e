"""Matmuls of operands that are already in FP8, and the same matmuls in bfloat16.

fprop is [M, K] with [N, K], and the last axes are contracted. wgrad is [M, K] with [M, N], and the
first axes are contracted, because a layer keeps its arrays so. Some tensor cores need the
contracted axis last. Then the timed program has XLA's transpositions too.

Letters: M tokens; K and N are the axes of the weight.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import rivals
from case import Case, nbytes
from jax import lax
from rivals import bf16_options
from target import Target

import jaxfp8 as fp8
from jaxfp8.kernels.scaled_matmul import _api as matmul

SECTION = "matmuls"
REFERENCE, BASELINE = "reference", "bf16"
# M, N, K: a cube, and the dense shapes of DeepGEMM (README of deepseek-ai/DeepGEMM at its first
# release, M = 4096).
SHAPES = (
    (8192, 8192, 8192),
    (4096, 4096, 7168),
    (4096, 24576, 1536),
    (4096, 7168, 2048),
    (4096, 7168, 16384),
    (4096, 2112, 7168),
    (4096, 32768, 512),
)
TINY_SHAPES = ((256, 128, 384),)
DIMENSIONS: dict[str, Any] = {"fprop": (((1,), (1,)), ((), ())), "wgrad": (((0,), (0,)), ((), ()))}
Operation = Literal["fprop", "wgrad"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """How the operands of a recipe's matmuls are scaled.

    Attributes:
      name: its name in tables.
      recipe: a function that makes the recipe.
      fprop: granularities of lhs [M, K] and rhs [N, K].
      wgrad: granularities of lhs [M, K] and rhs [M, N]. None if another kind has the same.
      gradient: format of rhs in wgrad.
      scales: arguments of `fp8.quantize` that say how amaxes become scales.
    """

    name: str
    recipe: Callable[..., fp8.Recipe]
    fprop: tuple[Any, Any]
    wgrad: tuple[Any, Any] | None
    gradient: fp8.quantizers.Format
    scales: dict[str, Any]

    def operands(self, operation: Operation, m: int, n: int, k: int) -> tuple[Any, Any]:
        """Types of lhs and rhs."""
        shapes = ((m, k), (n, k)) if operation == "fprop" else ((m, k), (m, n))
        formats = (fp8.E4M3, fp8.E4M3 if operation == "fprop" else self.gradient)
        granularities = self.fprop if operation == "fprop" or self.wgrad is None else self.wgrad
        lhs, rhs = (
            jax.eval_shape(
                lambda x, format=format, granularity=granularity: fp8.quantize(
                    x, format, granularity, **self.scales
                ),
                jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            )
            for shape, format, granularity in zip(shapes, formats, granularities, strict=True)
        )
        return lhs, rhs


KINDS = (
    Kind(
        name="tensor",
        recipe=fp8.recipes.current,
        scales={},
        gradient=fp8.E5M2,
        fprop=(fp8.PerTensor(), fp8.PerTensor()),
        wgrad=(fp8.PerTensor(), fp8.PerTensor()),
    ),
    Kind(
        name="rows",
        recipe=fp8.recipes.rowwise,
        scales={"power_of_two": True},
        gradient=fp8.E4M3,
        fprop=(fp8.PerAxis(0), fp8.PerAxis(0)),
        wgrad=(fp8.PerAxis(1), fp8.PerAxis(1)),
    ),
    Kind(
        name="tiles of 128",
        recipe=fp8.recipes.blockwise,
        scales={"power_of_two": True},
        gradient=fp8.E4M3,
        fprop=(fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128))),
        wgrad=(fp8.PerBlock((128, 1)), fp8.PerBlock((128, 1))),
    ),
    Kind(
        name="MXFP8",
        recipe=fp8.recipes.mxfp8,
        scales={"scale_format": fp8.E8M0},
        gradient=fp8.E4M3,
        fprop=(fp8.PerBlock((1, 32)), fp8.PerBlock((1, 32))),
        wgrad=(fp8.PerBlock((32, 1)), fp8.PerBlock((32, 1))),
    ),
    Kind(
        name="MXFP8 32x32",
        recipe=functools.partial(fp8.recipes.mxfp8, w_tile_dim=2),
        scales={"scale_format": fp8.E8M0},
        gradient=fp8.E4M3,
        fprop=(fp8.PerBlock((1, 32)), fp8.PerBlock((32, 32))),
        wgrad=None,
    ),
)


def kinds_of(operation: Operation) -> list[Kind]:
    return [kind for kind in KINDS if operation == "fprop" or kind.wgrad is not None]


def options(kind: Kind, chip: str) -> dict[str, bool]:
    return fp8.Kernels(chip).compiler_options(kind.recipe())


def scaled(
    operation: Operation, backend: str, chip: str, *, fast: bool = False, dtype: Any = jnp.bfloat16
) -> Callable[..., jax.Array]:
    """`fp8.scaled_matmul` by a backend, of two operands and an optional array `add_to`.

    The result of the matmul is added to that array.
    """

    def run(lhs: Any, rhs: Any, add_to: Any = None) -> jax.Array:
        return fp8.scaled_matmul(
            lhs,
            rhs,
            dimension_numbers=DIMENSIONS[operation],
            preferred_element_type=dtype,
            add_to=add_to,
            fast_accumulation=fast,
            kernels=fp8.Kernels(chip, matmuls=backend),
        )

    return run


def bf16(operation: Operation) -> Callable[..., jax.Array]:
    return lambda lhs, rhs: lax.dot_general(
        lhs, rhs, DIMENSIONS[operation], preferred_element_type=jnp.bfloat16
    )


def cases(shapes: tuple[tuple[int, int, int], ...], target: Target) -> Iterator[Case]:
    for m, n, k in shapes:
        yield from one_matmul("fprop", m, n, k, target.chip)
        yield from one_matmul("wgrad", m, n, k, target.chip)


def one_matmul(operation: Operation, m: int, n: int, k: int, chip: str) -> Iterator[Case]:
    elements = m * n if operation == "fprop" else k * n

    def case(contender: str, function: Any, arguments: Any, **fields: Any) -> Case:
        written = elements * (2 if len(arguments) == 2 else 4)
        return Case(
            section=SECTION,
            group=f"{m}x{n}x{k}",
            operation=operation,
            contender=contender,
            function=function,
            arguments=arguments,
            flops=2 * m * n * k,
            bytes=nbytes(arguments) + written,
            **fields,
        )

    shapes = ((m, k), (n, k)) if operation == "fprop" else ((m, k), (m, n))
    plain = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    yield case(BASELINE, bf16(operation), plain, options=bf16_options(chip))
    if m == n == k and operation == "fprop":
        yield case("bf16, Triton allowed", bf16(operation), plain)
    for kind in kinds_of(operation):
        operands = kind.operands(operation, m, n, k)
        if kind.name == "tensor":
            by_hand = rivals.plain_matmul(DIMENSIONS[operation])
            yield case(
                f"{kind.name}, {rivals.PLAIN}", by_hand, operands, options=options(kind, chip)
            )
        for backend in matmul.BACKENDS:
            if backend == REFERENCE:
                continue
            fields = {"named": {"matmuls": backend}, "options": options(kind, chip)}
            yield case(
                f"{kind.name}, {backend}", scaled(operation, backend, chip), operands, **fields
            )
            if has_addend(kind, operation) and backend != "cudnn":
                # Gradients of microbatches are added in this way. Each repetition reads the same
                # addend. So a backend that overwrites its addend copies it first.
                summed = (*operands, jax.ShapeDtypeStruct((k, n), jnp.float32))
                add = scaled(operation, backend, chip, dtype=jnp.float32)
                yield case(f"{kind.name}, {backend}, added to float32", add, summed, **fields)
            if has_fast(kind, operation) and backend != "cudnn":
                fast = scaled(operation, backend, chip, fast=True)
                yield case(f"{kind.name}, {backend}, fast accumulation", fast, operands, **fields)


def has_fast(kind: Kind, operation: Operation) -> bool:
    """Whether a matmul is also timed with fast accumulation."""
    return kind.name in ("tensor", "rows") and operation == "fprop"


def has_addend(kind: Kind, operation: Operation) -> bool:
    """Whether a matmul is also timed with an array that its result is added to."""
    return kind.name in ("tensor", "tiles of 128") and operation == "wgrad"
