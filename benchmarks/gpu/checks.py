"""Every backend against the reference: casts bit for bit, matmuls within the bounds of rounding.

The device's memory is poisoned before each run. Arrays of the sizes of the results are filled with
one byte and freed. The results then get the same memory, so bytes that a kernel does not write are
visible. Each program runs twice, with different bytes and inputs.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import casts
import jax
import jax.numpy as jnp
import matmuls
import ml_dtypes
import numpy as np
from case import Case, nbytes
from target import Target
from timing import Inputs

import jaxfp8 as fp8

SECTION = "checks"
# The first shape has only complete tiles, and more tiles than an H200 has processors. The second is
# in float32. The third has incomplete tiles, for which a kernel may raise NotImplementedError.
CAST_SHAPES = (((2048, 1280), "bfloat16"), ((384, 640), "float32"), ((300, 272), "bfloat16"))
TINY_CAST_SHAPES = (((128, 256), "bfloat16"),)
MATMUL_SHAPE, TINY_MATMUL_SHAPE = (256, 384, 1024), (32, 48, 256)
POISON = (0x7B, 0xC4)
"""Bytes that are finite values in every dtype here, and unlikely results in each."""
# Bounds of the relative error in Frobenius norm, before the result is rounded. The expected result
# is a float64 matmul of the dequantized operands.
CPU_BOUND = 2e-6
GPU_BOUND = 1e-3
"""For tensor cores with float32 sums, or sums that are added to float32 every 128 values of K."""
FAST_BOUND = 1e-2
"""For partial sums of about 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""
BFLOAT16_ROUNDING = 2.0**-9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Check:
    """A program, its inputs and its expected results.

    Attributes:
      case: the program.
      arguments: takes the number of the run, 0 or 1, and returns inputs on the host.
      wanted: takes the number of the run, and returns the expected results. Checks with the same
        expected results share one object.
      verdict: takes (expected results, results on the host), and returns figures. They have an
        "error" if the results are wrong.
    """

    case: Case
    arguments: Callable[[int], Any]
    wanted: Callable[[int], Any]
    verdict: Callable[[Any, Any], dict[str, Any]]


def checks(target: Target, *, tiny: bool, reference: Any) -> Iterator[Check]:
    """All checks.

    `reference` is the device on which the reference runs. On a GPU the reference is also a
    contender.
    """
    left_out = () if target.is_gpu else (casts.REFERENCE,)
    for shape, dtype in TINY_CAST_SHAPES if tiny else CAST_SHAPES:
        for cast in casts.CASTS:
            backends = [name for name in cast.backends if name not in left_out]
            yield from cast_checks(cast, shape, dtype, backends, target, reference)
    inputs = Inputs(reference)
    for operation in matmuls.DIMENSIONS:
        for kind in matmuls.kinds_of(operation):
            backends = [name for name in matmuls.matmul.BACKENDS if name not in left_out]
            shape = TINY_MATMUL_SHAPE if tiny else MATMUL_SHAPE
            yield from matmul_checks(kind, operation, shape, backends, target, inputs)


def cast_checks(
    cast: casts.Way,
    shape: tuple[int, int],
    dtype: str,
    backends: Sequence[str],
    target: Target,
    reference: Any,
) -> Iterator[Check]:
    def arguments(number: int) -> Any:
        return hard(shape, np.dtype(dtype), finite=number == 0), *[
            np.float32(448 / 3)
        ] * cast.scalars

    def wanted(number: int) -> Any:
        return on(reference, cast.by(casts.REFERENCE), arguments(number))

    for backend in backends:
        case = Case(
            section=SECTION,
            group=f"{casts.named(shape)} {dtype}",
            operation=cast.name,
            contender=backend,
            named={"casts": backend},
            function=cast.by(backend, target.chip),
            arguments=cast.arguments(shape, jnp.dtype(dtype)),
            looped=False,
        )
        yield Check(case=case, arguments=arguments, wanted=wanted, verdict=same_bits)


def matmul_checks(
    kind: matmuls.Kind,
    operation: Any,
    shape: tuple[int, int, int],
    backends: Sequence[str],
    target: Target,
    inputs: Inputs,
) -> Iterator[Check]:
    operands = kind.operands(operation, *shape)
    arguments = functools.partial(inputs.of, operands)

    def wanted(number: int) -> Any:
        return product(operation, arguments(number))

    fast_too = (False, True) if matmuls.has_fast(kind, operation) else (False,)
    for backend, dtype, fast in itertools.product(backends, (jnp.float32, jnp.bfloat16), fast_too):
        case = Case(
            section=SECTION,
            group=f"{casts.named(shape)} {jnp.dtype(dtype).name}",
            operation=operation,
            contender=f"{kind.name}, {backend}{', fast accumulation' if fast else ''}",
            named={"matmuls": backend},
            looped=False,
            function=matmuls.scaled(operation, backend, target.chip, fast=fast, dtype=dtype),
            arguments=operands,
            options=matmuls.options(kind, target.chip),
        )
        bound = (FAST_BOUND if fast else GPU_BOUND) if target.is_gpu else CPU_BOUND
        bound += BFLOAT16_ROUNDING * (1 + bound) if dtype == jnp.bfloat16 else 0.0
        yield Check(
            case=case, arguments=arguments, wanted=wanted, verdict=functools.partial(near, bound)
        )


def on(device: Any, function: Callable[..., Any], arguments: Any) -> Any:
    """The result of a function on a device, copied to the host."""
    with jax.default_device(device):
        return jax.tree.map(np.asarray, jax.jit(function)(*jax.device_put(arguments, device)))


def hard(shape: tuple[int, int], dtype: np.dtype, *, finite: bool) -> np.ndarray:
    """Random values with a different magnitude in each tile of 32, zeros, subnormals and ties.

    NaN and inf are among them unless `finite`.
    """
    random, info = np.random.default_rng(int(finite)), ml_dtypes.finfo(dtype)
    rows, columns = (np.arange(size) // 32 for size in shape)
    exponents = random.integers(-30, 30, (rows[-1] + 1, columns[-1] + 1))
    exponents[0, :] = -130 if info.bits == 32 else -120  # these tiles count as zero, or nearly
    x = np.ldexp(random.standard_normal(shape), exponents[rows[:, None], columns])
    x[32:48] = 0
    # These values are between E4M3's values, and often half-way.
    x[48:64] = np.sign(x[48:64]) * random.integers(1, 449, (16, shape[1]))
    x[48:64, 0] = 448  # E4M3's maximum, so the scale of these rows is 1
    for value in () if finite else (np.nan, np.inf, -np.inf):
        x[random.integers(64, shape[0]), random.integers(shape[1])] = value
    return x.astype(dtype)


def same_bits(wanted: Any, results: Any) -> dict[str, Any]:
    """The number of bytes that differ, and an error if there are any."""
    different = 0
    for expected, result in zip(jax.tree.leaves(wanted), jax.tree.leaves(results), strict=True):
        if (expected.shape, expected.dtype) != (result.shape, result.dtype):
            return {"error": f"{result.dtype}{result.shape}, not {expected.dtype}{expected.shape}"}
        different += int((_bytes(expected) != _bytes(result)).sum())
    return {"different_bytes": different} | (
        {"error": f"{different} bytes differ"} if different else {}
    )


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def product(operation: matmuls.Operation, operands: Any) -> np.ndarray:
    """The matmul of the dequantized operands in float64."""
    lhs, rhs = (_dequantized(operand) for operand in operands)
    return lhs @ rhs.T if operation == "fprop" else lhs.T @ rhs


def _dequantized(q: fp8.QuantizedTensor) -> np.ndarray:
    scale = np.asarray(q.scale).astype(np.float64)
    if isinstance(q.granularity, fp8.PerBlock):
        for axis, side in enumerate(q.granularity.along(q.ndim)):
            scale = scale.repeat(side, axis)
        scale = scale[tuple(map(slice, q.shape))]
    return np.asarray(q.values).astype(np.float64) * scale


def near(bound: float, wanted: np.ndarray, result: np.ndarray) -> dict[str, Any]:
    """The relative distance, and an error unless it is within the bound. NaN is never within."""
    distance = float(np.linalg.norm(result.astype(np.float64) - wanted) / np.linalg.norm(wanted))
    figures = {"distance": distance, "bound": bound}
    return (
        figures
        if distance <= bound
        else figures | {"error": f"distance {distance:.2e}, the bound is {bound:.2e}"}
    )


def judge(check: Check, program: Any, types: Any, wanted: Any, device: Any) -> dict[str, Any]:
    """Runs a program twice, with different inputs.

    Returns:
      The figures of the verdict, and the share of the results' bytes that got poisoned memory.
    """
    found: dict[str, Any] = {}
    inside = total = 0
    for number, byte in enumerate(POISON):
        arguments = jax.block_until_ready(jax.device_put(check.arguments(number), device))
        ranges = poison(types, byte, device)
        results = jax.block_until_ready(program(*arguments))
        for array in jax.tree.leaves(results):
            first, total = array.unsafe_buffer_pointer(), total + array.nbytes
            inside += sum(
                max(0, min(first + array.nbytes, end) - max(first, begin)) for begin, end in ranges
            )
        found = check.verdict(wanted[number], jax.tree.map(np.asarray, results))
        if "error" in found:
            break
    return found | {"poisoned": round(min(inside / max(total, 1), 1.0), 3)}


def poison(types: Any, byte: int, device: Any) -> list[tuple[int, int]]:
    """Fills memory of the sizes of these arrays with a byte, and frees it.

    Returns:
      The address ranges of that memory, which do not overlap.
    """
    arrays = [
        jax.device_put(np.full(nbytes(leaf), byte, np.uint8), device)
        for leaf in jax.tree.leaves(types)
        for _ in range(2)
    ]
    jax.block_until_ready(arrays)
    ranges = [(a.unsafe_buffer_pointer(), a.unsafe_buffer_pointer() + a.nbytes) for a in arrays]
    for array in arrays:
        array.delete()
    return ranges


def wanted_by_all(
    every: Sequence[Check], pool: concurrent.futures.Executor
) -> dict[Any, concurrent.futures.Future]:
    """The expected results of both runs, by the function `wanted` that computes them."""
    some = dict.fromkeys(check.wanted for check in every)
    return {
        wanted: pool.submit(lambda wanted=wanted: [wanted(number) for number in range(len(POISON))])
        for wanted in some
    }
