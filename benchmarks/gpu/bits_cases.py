"""The matmuls whose bits are predicted: their operands, programs and predictions.

Letters: M N K the axes of a matmul.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import predicted
from target import Target

import jaxfp8 as fp8

MOST = 3.0
"""How large the error of a library may be, in errors of the prediction."""
ROWS_AT_ONCE = 64
"""Rows that a thread predicts of a matmul on Blackwell: NumPy holds 32 products of each result."""
TENSOR = fp8.PerTensor()
TILES = {side: fp8.PerBlock((1, side)) for side in (32, 128)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul, and the rule that it follows.

    Attributes:
      name: its name in tables.
      backend: that of `fp8.Kernels(chip, matmuls=...)`.
      granularities: those of lhs [M, K] and rhs [N, K], or of [K, M] and [K, N].
      scales: "float32", "power of two" or "E8M0".
      rule: how it adds.
      last: True if K is the last axis of the operands.
      recipe: the recipe whose compiler options XLA gets.
      inside: True if the tensor cores take scales with the values.
    """

    name: str
    backend: str
    granularities: tuple[Any, Any]
    scales: str
    rule: predicted.Rule
    last: bool = True
    recipe: str = "current"
    inside: bool = False

    @property
    def exact(self) -> bool:
        """Whether a different bit is a fault: where the order of sums is ours."""
        return self.backend == "mosaic"


def matmuls(chip: str) -> Iterator[Matmul]:
    """Those of a chip. A CPU has those of an H200."""
    if chip == "b200":
        # Its tensor cores keep the bits of float32, so there is no promotion.
        one = functools.partial(Matmul, rule=predicted.FAST, backend="xla")
        yield one(name="tensor", granularities=(TENSOR, TENSOR), scales="power of two")
        yield one(
            name="MXFP8", backend="cudnn", granularities=(TILES[32], TILES[32]), scales="E8M0",
            rule=predicted.tiles(32), recipe="mxfp8", inside=True,
        )  # fmt: skip
        return
    rows, columns = fp8.PerAxis(0), fp8.PerAxis(1)
    for title, rule in (("", predicted.FULL), (", fast accumulation", predicted.FAST)):
        one = functools.partial(Matmul, name=f"tensor{title}", rule=rule)
        yield one(backend="xla", granularities=(TENSOR, TENSOR), scales="power of two")
        yield one(backend="mosaic", granularities=(TENSOR, TENSOR), scales="float32")
        yield Matmul(
            name=f"rows, wgrad{title}", backend="mosaic", granularities=(columns, columns),
            scales="float32", rule=rule, last=False, recipe="rowwise",
        )  # fmt: skip
        yield Matmul(
            name=f"rows{title}", backend="xla", granularities=(rows, rows), scales="power of two",
            rule=rule, recipe="rowwise",
        )  # fmt: skip
    for name, lhs, rhs, side, last in (
        ("1x128 @ 128x128", TILES[128], fp8.PerBlock((128, 128)), 128, True),
        ("1x128 @ 1x128, wgrad", *[fp8.PerBlock((128, 1))] * 2, 128, False),
        ("1x32 @ 1x32", TILES[32], TILES[32], 32, True),
        ("1x32 @ 32x32", TILES[32], fp8.PerBlock((32, 32)), 32, True),
    ):
        yield Matmul(
            name=name, backend="mosaic", granularities=(lhs, rhs), last=last,
            scales="E8M0" if name == "1x32 @ 1x32" else "float32", rule=predicted.tiles(side),
            recipe="blockwise" if side == 128 else "mxfp8",
        )  # fmt: skip


def operands(of: Matmul, outputs: int, *, one_sign: bool) -> tuple[Any, ...]:
    """Random operands for at least so many results, on the host. All scales differ."""
    # cuBLASLt needs multiples of 16. Our kernels take ragged tiles, too.
    side = -(-math.isqrt(outputs) // 16) * 16 + 16
    k = 1000 if of.exact else 1024
    shape = (side, k) if of.last else (k, side)
    return tuple(
        _operand(of, granularity, shape, seed, one_sign)
        for seed, granularity in enumerate(of.granularities)
    )


def _operand(of: Matmul, granularity: Any, shape: tuple[int, int], seed: int, one: bool) -> Any:
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape, np.float32) * 60
    values = np.clip(np.abs(values) if one else values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    cells = granularity.scale_shape(shape)
    exponents = random.integers(-9, 9, cells)
    if of.scales == "E8M0":
        scale = np.asarray(127 + exponents, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    else:
        mantissa = random.uniform(1, 2, cells) if of.scales == "float32" else 1.0
        scale = np.asarray(np.ldexp(mantissa, exponents), np.float32)
    exact = of.scales != "float32"
    return fp8.QuantizedTensor(values, scale, granularity, jnp.dtype(jnp.float32), exact)


def function(of: Matmul, kernels: fp8.Kernels) -> Callable[..., jax.Array]:
    """The matmul as a function of both operands, with a float32 result."""
    axis = 1 if of.last else 0

    def run(lhs: Any, rhs: Any) -> jax.Array:
        return fp8.scaled_matmul(
            lhs,
            rhs,
            dimension_numbers=(((axis,), (axis,)), ((), ())),
            preferred_element_type=jnp.float32,
            fast_accumulation=of.rule.every is None,
            kernels=kernels,
        )

    return run


def compiled(of: Matmul, target: Target, given: tuple[Any, ...]) -> jax.stages.Compiled:
    """The program. Raises NotImplementedError if the backend does not take it."""

    def type_of(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target.sharding)

    options = fp8.Kernels(target.chip).compiler_options(fp8.recipes.get(of.recipe))
    run = function(of, fp8.Kernels(target.chip, matmuls=of.backend))
    with target.context():
        return jax.jit(run).lower(*jax.tree.map(type_of, given)).compile(options)


def predict(of: Matmul, given: tuple[Any, ...], chip: str) -> np.ndarray:
    """The predicted bits, [M, N] float32."""
    (a, a_scale), (b, b_scale) = (predicted.matrix(q, of.last, of.rule) for q in given)
    if chip != "b200":
        return predicted.predicted((a, b), (a_scale, b_scale), of.rule)

    def some(first: int) -> np.ndarray:
        part = slice(first, first + ROWS_AT_ONCE)
        if not of.inside:
            both = (a[part], b), (a_scale[part], b_scale)
            return predicted.predicted(*both, of.rule, predicted.tcgen05)
        sums = np.zeros((len(a[part]), len(b)), np.float32)
        return predicted.tcgen05(a[part], b, sums, a_scale[part], b_scale)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.concatenate([*pool.map(some, range(0, len(a), ROWS_AT_ONCE))])


def exact(of: Matmul, given: tuple[Any, ...]) -> np.ndarray:
    """The matmul of the dequantized operands, [M, N] float64."""
    wide = []
    for values, scale in (predicted.matrix(q, of.last, of.rule) for q in given):
        along = values.shape[1] if scale.shape[1] == 1 else of.rule.every
        cells = scale.astype(np.float64).repeat(along, 1)[:, : values.shape[1]]
        wide.append(values.astype(np.float64) * cells)
    return wide[0] @ wide[1].T


def row(
    of: Matmul, target: Target, outputs: int, *, one_sign: bool, compile_only: bool
) -> dict[str, Any]:
    """What a matmul gave, beside the prediction."""
    signs = "one sign" if one_sign else "mixed signs"
    found: dict[str, Any] = {"path": f"{of.name}, {of.backend}, {signs}", "exact": of.exact}
    if of.backend != "xla" and not target.is_gpu:
        return found | {"status": "skipped", "reason": f"{of.backend} needs a GPU"}
    given = operands(of, outputs, one_sign=one_sign)
    try:
        program = compiled(of, target, given)
    except NotImplementedError as reason:
        return found | {"status": "skipped", "reason": " ".join(str(reason).split())}
    if compile_only:
        return found | {"status": "compiled"}
    got = np.asarray(program(*jax.device_put(given, target.device)))
    wanted, true = predict(of, given, target.chip), exact(of, given)
    found |= compare(got, wanted, true, same_bits=of.exact)
    if of.exact or of.rule not in RULES.values():
        return found
    # Which rule does the library follow? With the exact result, for what does not add like a
    # tensor core.
    others = {
        name: predict(dataclasses.replace(of, rule=rule), given, target.chip)
        for name, rule in RULES.items()
    }
    distances = {
        name: _norm(got - other) / _norm(true) for name, other in {**others, "exact": true}.items()
    }
    found |= {"distances": distances, "nearest": min(distances, key=distances.__getitem__)}
    if found["status"] == "failed" or not target.is_gpu or target.chip == "b200":
        return found
    if RULES.get(found["nearest"]) != of.rule:
        reason = f"the result is nearer to {found['nearest']!r} than to the rule of this row"
        return found | {"status": "failed", "reason": reason}
    return found


RULES = {"never promoted": predicted.FAST, "promoted every 128": predicted.FULL}


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def compare(
    got: np.ndarray, wanted: np.ndarray, true: np.ndarray, *, same_bits: bool
) -> dict[str, Any]:
    """The figures of a row. It fails if a bit differs that must not, or if the error is large."""
    others = np.argwhere(got.view(np.uint32) != wanted.view(np.uint32))
    size = _norm(true)
    of_model, error, distance = (
        _norm(x.astype(np.float64) - y) / size
        for x, y in ((wanted, true), (got, true), (got, wanted))
    )
    found = {
        "outputs": got.size,
        "different": len(others),
        "distance": distance,
        "error": error,
        "error_of_prediction": of_model,
    }
    right = not len(others) if same_bits else error <= MOST * of_model  # NaN is never within it
    if right:
        return found | {"status": "ok"}
    at = tuple(int(i) for i in others[0])
    reason = f"{len(others)} of {got.size} differ, at {at}: {got[at]!r}, predicted {wanted[at]!r}"
    return found | {"status": "failed", "reason": reason}
