"""Arrays that break careless casts, and messages that help."""

import re

import ml_dtypes
import numpy as np
import oracle

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SHAPE = (11, 130)  # divides by nothing that a kernel likes


def hard_arrays(dtype) -> dict[str, np.ndarray]:
    """Arrays of one shape and dtype, by what is hard about them."""
    random = np.random.default_rng(0)
    info = ml_dtypes.finfo(dtype)
    largest, smallest = float(info.max), float(info.smallest_subnormal)
    normal = random.standard_normal(SHAPE)
    uniform = random.uniform(-1, 1, SHAPE)
    arrays = {
        "gaussian": normal,
        "student_t": random.standard_t(2, SHAPE),
        "zero": np.copysign(np.zeros(SHAPE), normal),
        "subnormal": np.rint(uniform * 100) * smallest,
        "around_2_to_the_minus_126": uniform * 2.0**-125,
        "below_te_limit": uniform * 1e-37,
        "huge": uniform * largest,
        "largest": np.copysign(np.full(SHAPE, largest), normal),
        "wide": np.ldexp(uniform, random.integers(-150, 120, SHAPE)),
        "one_inf": normal.copy(),
        "one_nan": normal.copy(),
        "all_nan": np.full(SHAPE, np.nan),
    }
    arrays["one_inf"][3, 7] = -np.inf
    arrays["one_nan"][5, 0] = np.nan
    arrays["a_row_of_each"] = np.stack([array[1] for array in list(arrays.values())[: SHAPE[0]]])
    with np.errstate(over="ignore", under="ignore"):
        return {name: array.astype(dtype) for name, array in arrays.items()}


def cast_inputs(format) -> np.ndarray:
    """All values of a format, midpoints, their float32 neighbours, all of bfloat16, and bits at
    random; both signs.
    """
    values = oracle.values_of(format.name)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [2 * values[-1]]]).astype(
        np.float32
    )
    beside = [np.nextafter(points, np.float32(end)) for end in (0, np.inf)]
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    drawn = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
    return np.concatenate([points, *beside, -points, *(-each for each in beside), every, drawn])


def mentions(*parts: str) -> str:
    """A pattern that matches a message in which all these parts stand, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
