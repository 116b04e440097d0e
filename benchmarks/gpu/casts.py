"""Casts from high precision to FP8, in every granularity, by every backend.

A new backend in jaxfp8's tables is automatically a contender here. Some casts are also timed in the
plain pattern, see `rivals.py`.

Each result has the layout in which a matmul on Hopper or Blackwell reads it. A copy for the other
direction is written transposed. Scales of tiles of 128 have the kept axis last. Scales of MXFP8
have the contracted axis last.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import rivals
from case import Case, nbytes
from target import Target

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import Cast, Direction
from jaxfp8.kernels.cast import _api as cast
from jaxfp8.numerics import amax
from jaxfp8.numerics._scale import ScaleRule

SECTION = "casts"
# The first shape is the simplest. The largest is far larger than every cache.
SHAPES = ((8192, 8192), (4096, 4096), (131072, 8192), (16384, 14336), (32768, 4096))
TINY_SHAPES = ((256, 512),)
REFERENCE = "reference"

POWERS = ScaleRule(power_of_two=True)
BYTES = ScaleRule(scale_format=fp8.E8M0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to quantize.

    Attributes:
      name: its name in tables.
      run: takes (x, kernels, *scalars), and returns a tuple of arrays.
      backends: the backends of the kernel, by name.
      scalars: number of float32 scalars that `run` takes.
      beside: takes the shape of x, and returns the types of further arrays that `run` takes.
    """

    name: str
    run: Callable[..., tuple[jax.Array, ...]]
    backends: Mapping[str, Any]
    scalars: int = 0
    beside: Callable[[tuple[int, ...]], tuple[jax.ShapeDtypeStruct, ...]] = lambda shape: ()

    def arguments(
        self, shape: tuple[int, ...], dtype: Any = jnp.bfloat16
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * self.scalars
        return jax.ShapeDtypeStruct(shape, dtype), *self.beside(shape), *scalars

    def by(self, backend: str, chip: str | None = None) -> Callable[..., tuple[jax.Array, ...]]:
        return lambda x, *scalars: self.run(x, fp8.Kernels(chip, casts=backend), *scalars)


def known_scale(
    x: jax.Array, kernels: fp8.Kernels, multiplier: jax.Array, *, both: bool = False
) -> tuple[jax.Array, ...]:
    """The cast of delayed scaling: the scale is known, and the next step needs the amax.

    With `both` the cast also makes a transposed copy.
    """
    directions = Direction(fp8.PerTensor()), Direction(fp8.PerTensor(), transposed=True)
    how = cast_by(kernels, x, directions if both else directions[:1])
    scale = cast.KnownScale(multiplier, multiplier)
    copies, extras = cast.cast_copies(x, how, (scale,) * len(how.directions))
    largest = amax(x if extras.largest is None else extras.largest, fp8.PerTensor())
    return copies[0].values, *(copy.values.T for copy in copies[1:]), largest


def cast_by(
    kernels: fp8.Kernels, x: jax.Array, directions: tuple[Direction, ...], **fields: Any
) -> Cast:
    """A cast of x to E4M3 by these kernels, with the arguments that a layer passes."""
    granularities = tuple(direction.granularity for direction in directions)
    backends = kernels.for_cast(granularities, x.size)
    return Cast(format=fp8.E4M3, directions=directions, backends=backends, **fields)


def options_of(rule: ScaleRule) -> dict[str, Any]:
    """The fields of a rule as arguments of `fp8.quantize`."""
    return {"power_of_two": rule.power_of_two, "scale_format": rule.scale_format}


# Triton's kernel finds its scales, and reads one array: it takes no known scales and no prologue.
NOT_TRITON = {name: backend for name, backend in cast.BACKENDS.items() if name != "triton"}


def quantized(name: str, *granularities: Any, rule: ScaleRule) -> Way:
    """A cast with scales from the array's own amaxes, in each granularity."""

    def run(x: jax.Array, kernels: fp8.Kernels) -> tuple[jax.Array, ...]:
        copies = fp8.quantize(x, fp8.E4M3, granularities, kernels=kernels, **options_of(rule))
        return tuple(array for q in copies for array in as_read(q))

    return Way(name=name, run=run, backends=cast.BACKENDS)


def produced(
    name: str, prologue: Any, beside: Callable[..., Any], *granularities: Any, rule: ScaleRule
) -> Way:
    """The same as `quantized`, for the result of a prologue of x and another array.

    XLA fuses the prologue with the cast if it can. The kernels always compute it in the cast.
    """

    def run(x: jax.Array, kernels: fp8.Kernels, other: jax.Array) -> tuple[jax.Array, ...]:
        how = {"prologue": prologue, "kernels": kernels, **options_of(rule)}
        copies = fp8.quantize((x, other), fp8.E4M3, granularities, **how)
        return tuple(array for q in copies for array in as_read(q))

    return Way(name=name, run=run, backends=NOT_TRITON, beside=lambda shape: (beside(shape),))


def summed(name: str, *granularities: Any, rule: ScaleRule) -> Way:
    """The same as `quantized`, with sums of columns. A gradient needs them for that of a bias."""

    def run(x: jax.Array, kernels: fp8.Kernels) -> tuple[jax.Array, ...]:
        directions = tuple(map(Direction, granularities))
        how = cast_by(kernels, x, directions, rule=rule, column_sums=True)
        copies, extras = cast.cast_copies(x, how)
        sums = jnp.sum(x if extras.column_sums is None else extras.column_sums, 0, jnp.float32)
        return *(array for q in copies for array in as_read(q)), sums

    return Way(name=name, run=run, backends=cast.BACKENDS)


def as_read(q: fp8.QuantizedTensor) -> tuple[jax.Array, jax.Array]:
    """Values and scale of [M, K] as a matmul reads them."""
    sides = q.granularity.along(2) if q.granularity.in_tiles else ()
    columns = q.granularity == fp8.PerAxis(1) or (sides and sides[1] == 1)
    values = q.values.T if columns else q.values
    if not sides:
        return values, q.scale.ravel()
    contracted_last = q.scale.dtype != jnp.float32
    return values, q.scale.T if bool(columns) == contracted_last else q.scale


CASTS = (
    Way(name="tensor, scale known, and amax", run=known_scale, backends=NOT_TRITON, scalars=1),
    quantized("1x128 and 128x1", fp8.PerBlock((1, 128)), fp8.PerBlock((128, 1)), rule=POWERS),
    quantized("1x128", fp8.PerBlock((1, 128)), rule=POWERS),
    quantized("rows", fp8.PerAxis(0), rule=POWERS),
    quantized("tensor", fp8.PerTensor(), rule=ScaleRule()),
    quantized("128x128", fp8.PerBlock((128, 128)), rule=POWERS),
    quantized("MXFP8 1x32", fp8.PerBlock((1, 32)), rule=BYTES),
    quantized("MXFP8 1x32 and 32x1", fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1)), rule=BYTES),
    Way(
        name="tensor, scale known, amax, and transposed",
        run=functools.partial(known_scale, both=True),
        backends=NOT_TRITON,
        scalars=1,
    ),
    quantized("rows and columns", fp8.PerAxis(0), fp8.PerAxis(1), rule=POWERS),
    quantized("MXFP8 32x32", fp8.PerBlock((32, 32)), rule=BYTES),
)

# These casts are timed, but not checked against the reference on a CPU. Exponentials and sums have
# other bits on a GPU than on a CPU.
BESIDES = (
    summed(
        "sums of columns, 1x128 and 128x1",
        fp8.PerBlock((1, 128)),
        fp8.PerBlock((128, 1)),
        rule=POWERS,
    ),
    produced(
        "SwiGLU, 1x128 and 128x1",
        fp8.prologues.SwiGLU(),
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        fp8.PerBlock((1, 128)),
        fp8.PerBlock((128, 1)),
        rule=POWERS,
    ),
    produced(
        "RMSNorm, 1x128 and 128x1",
        fp8.prologues.RMSNorm(),
        lambda shape: jax.ShapeDtypeStruct(shape[-1:], jnp.float32),
        fp8.PerBlock((1, 128)),
        fp8.PerBlock((128, 1)),
        rule=POWERS,
    ),
)


def copies(shape: tuple[int, int], section: str = SECTION) -> Iterator[Case]:
    """Copies to compare casts with: the driver's copy on the device, and a kernel of XLA.

    Both move the same number of bytes.
    """
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for contender, function in (("copy", jnp.copy), ("negation", jnp.negative)):
        yield Case(
            section=section,
            group=named(shape),
            operation="copy",
            contender=contender,
            function=function,
            arguments=(x,),
            bytes=2 * nbytes(x),
        )


def cases(shapes: tuple[tuple[int, int], ...], target: Target) -> Iterator[Case]:
    for shape in shapes:
        yield from copies(shape)
        for cast_ in (*CASTS, *BESIDES):
            arguments = cast_.arguments(shape)
            written = jax.eval_shape(cast_.by(REFERENCE), *arguments)
            case = functools.partial(
                Case,
                section=SECTION,
                group=named(shape),
                operation=cast_.name,
                arguments=arguments,
                bytes=nbytes(arguments) + nbytes(written),
            )
            for backend in cast_.backends:
                if backend != REFERENCE:
                    yield case(
                        contender=backend,
                        named={"casts": backend},
                        function=cast_.by(backend, target.chip),
                    )
            if cast_.name in rivals.CASTS:
                yield case(contender=rivals.PLAIN, function=rivals.CASTS[cast_.name])


def named(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
