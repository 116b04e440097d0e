"""`Kernels`: which kernels cast and multiply. The one argument for all that depends on the chip."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from jaxfp8._typing import Array, DType
from jaxfp8.kernels._dispatch import Attempt
from jaxfp8.kernels._platform import chip_named
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._dtypes import FLOAT_DTYPES
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.plan._backends import (
    XLA,
    Backends,
    backends_for,
    best,
    copy_seconds,
    matmul_seconds,
)
from jaxfp8.plan._choices import Choices, explained
from jaxfp8.plan._compiler_options import compiler_options
from jaxfp8.plan._named_backends import check_named, cure_of
from jaxfp8.plan._report import Shape, check_shape
from jaxfp8.plan._routes import Side
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


@runtime_checkable
class Chooser(Protocol):
    """It knows which backend is fast for a matmul, as `fp8.plan.Timings` does."""

    def choose(self, *args: Any, **kwargs: Any) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Names of backends, best first, each with its extra arguments.

        `args` and `kwargs` are the arguments of the matmul.
        """


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which kernels cast and multiply: those for a chip.

    Every layer, op and plug takes it as `kernels=`. A recipe says which numbers come out, and
    `Kernels` says what computes them. A cast of the same array has the same bits with all kernels.
    Results of matmuls differ by the order in which they add.

    `Kernels()` is the default: XLA computes everything, on every chip.

    `Kernels("h200")` takes a kernel that is made for that chip where it is estimated to be faster
    than what XLA compiles. `print(kernels.choices(recipe, shape))` shows what is taken, and why.

    - Tiles on Hopper ("h100", "h200"): casts and block-scaled matmuls in Pallas.
    - Tiles on Blackwell ("b200"): casts in Pallas. With power-of-two scales, cuDNN's block-scaled
      matmuls.
    - Scales of tensors and of rows, on GPUs with FP8 units ("l4" and "l40s" too): casts by XLA, and
      matmuls by cuBLASLt, which XLA calls under `compiler_options`. Hopper's matmul in Pallas is
      taken for them by name or by timings only.
    - All else: XLA.

    Estimated, not measured: no GPU has timed the kernels in Pallas yet. `fp8.plan.autotune` times
    the matmuls of a step on your GPU. An estimate takes the shape on one device. In an Auto mesh it
    takes the shape on all devices together, because a program there does not tell the shape of one.

    If a kernel cannot do a case, XLA does it. `choices` then has the reason. The kernels in Pallas
    need jax 0.11 or later.

    The same program runs on other platforms than CUDA, a CPU for instance: there XLA computes what
    the kernels would. On another GPU than the one that is named it may not compile.

    Attributes:
      chip: its name ("h100", "h200", "b200", "l4", "l40s", "a100", "mi300x", "tpu", "cpu"), or
        None. An argument, never detected, so that all processes compile the same program.
      casts: a backend of casts by name, instead of the choice: "xla", "mosaic" (Pallas), "triton",
        or "reference" (for tests). A backend that is named and cannot do a case raises an error.
      matmuls: the same for matmuls: "xla", "mosaic", "cudnn" or "reference".
      timings: measured times of matmuls, from `fp8.plan.autotune`. A matmul that was timed takes
        what was fastest. Any other is chosen by estimates. Casts are not timed.

    Raises:
      ValueError: for an unknown chip or backend, a kernel that is not made for the chip, timings of
        another chip, or timings beside `matmuls`.
      TypeError: for timings that are none.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, w, recipe = jnp.ones((128, 256)), jnp.ones((256, 128)), fp8.recipes.blockwise()
      >>> fp8.dot(x, w, recipe=recipe, kernels=fp8.Kernels("h200"))[0, 0]
      Array(256., dtype=float32)
    """

    chip: str | None = None
    _: dataclasses.KW_ONLY
    casts: str | None = None
    matmuls: str | None = None
    timings: Chooser | None = None

    def __post_init__(self) -> None:
        chip = None if self.chip is None else chip_named(self.chip)
        check_named(self.casts, self.matmuls, chip)
        if self.timings is None:
            return
        if isinstance(self.timings, type) or not isinstance(self.timings, Chooser):
            raise TypeError(
                f"timings={self.timings!r} must be fp8.plan.Timings, for instance "
                "fp8.plan.Timings.load(path)."
            )
        if self.matmuls is not None:
            raise ValueError(
                f"matmuls={self.matmuls!r} and timings both choose matmuls; leave one out."
            )
        measured = getattr(self.timings, "chip", self.chip)
        if measured != self.chip:
            raise ValueError(
                f"timings are of chip {measured!r}, but chip={self.chip!r}; write "
                f"fp8.Kernels({measured!r}, timings=timings), or measure on this chip."
            )

    def choices(self, recipe: Recipe, shape: Shape, dtype: DType = jnp.bfloat16) -> Choices:
        """What each cast and each matmul of a layer runs, and why. `print` shows a table.

        The table holds for x [M, K] and w [K, N] on one device, and for the versions of jax and its
        packages that are installed here. Each kernel is traced, to know whether it can do its case.

        Args:
          recipe: which quantizer for which operand.
          shape: (M, K, N) of y [M, N] = x [M, K] @ w [K, N] on one device: tokens, features in,
            features out.
          dtype: of x, w and y.

        Raises:
          ValueError: for a shape that is not three positive integers.
          NotImplementedError: for a kernel that is named and cannot do the case.

        Example:
          >>> import jaxfp8 as fp8
          >>> print(fp8.Kernels("l4").choices(fp8.recipes.delayed(), (8192, 4096, 4096)))
          delayed, [8192, 4096] @ [4096, 4096], Kernels('l4')
          part    backend  known by   why
          cast x  xla      estimated  611.9 us; no other kernel is considered
          cast w  xla      estimated  307.9 us; no other kernel is considered
          cast g  xla      estimated  611.9 us; no other kernel is considered
          fprop   xla      estimated  1455.2 us, FP8; no other kernel is considered
          dgrad   xla      estimated  1455.2 us, FP8; no other kernel is considered
          wgrad   xla      estimated  1455.2 us, FP8; no other kernel is considered
        """
        check_recipe(recipe)
        if jnp.dtype(dtype).name not in FLOAT_DTYPES:
            raise TypeError(
                f"dtype={dtype!r} cannot be quantized; use one of {list(FLOAT_DTYPES)}."
            )
        return explained(self, recipe, check_shape(shape), jnp.dtype(dtype))

    def compiler_options(self, recipe: Recipe) -> dict[str, bool]:
        """The options under which XLA compiles a recipe for the chip as it is meant.

        They are for `jax.jit(step, compiler_options=)`.

        `xla_gpu_enable_triton_gemm=False`: by default XLA gives FP8 dots to its Triton emitter,
        which dequantizes them. Without that emitter they become `__cublas$lt$matmul$f8` calls. The
        option holds for the whole compiled function: its other matmuls go to cuBLASLt as well.

        `xla_allow_excess_precision=False`: every conversion to bfloat16 in the function rounds. FP8
        casts do not need this option. It is left out if a matmul reads float32 scales of whole
        tensors. With it, XLA would round those scales to bfloat16 before cuBLASLt, by up to 0.2 %
        each, since it recognizes a scale only in the dtype of the dequantized operand.

        Args:
          recipe: a Recipe.

        Returns:
          A dict. It is empty if XLA needs no option: on other platforms than NVIDIA's, for recipes
          without FP8 matmuls, and for float32 scales of whole tensors on GPUs without FP8 units.

        Raises:
          ValueError: if no chip is named.

        Example:
          >>> import jaxfp8 as fp8
          >>> fp8.Kernels("h200").compiler_options(fp8.recipes.delayed())
          {'xla_gpu_enable_triton_gemm': False}
          >>> fp8.Kernels("h200").compiler_options(fp8.recipes.blockwise())
          {'xla_allow_excess_precision': False}
          >>> fp8.Kernels("cpu").compiler_options(fp8.recipes.delayed())
          {}
        """
        check_recipe(recipe)
        if self.chip is None:
            raise ValueError(
                f"{self!r} names no chip, on which compiler options depend; write "
                'fp8.Kernels("h200") for instance.'
            )
        return compiler_options(recipe, self.chip)

    def backends(self, recipe: Recipe, shape: Shape) -> Backends:
        """Names of backends for each part of a layer of (M, K, N) on one device."""
        return backends_for(self.chip, self.casts, self.matmuls, recipe, shape)

    def for_cast(
        self, granularities: tuple[AbstractGranularity, ...], values: int
    ) -> tuple[str, ...]:
        """Names of backends of a cast without a recipe.

        Args:
          granularities: of each copy.
          values: how many values the array has.
        """
        if self.casts is not None:
            return (self.casts,)
        return XLA if self.chip is None else best(copy_seconds(granularities, self.chip, values))

    def attempts(
        self,
        names: Iterable[str],
        lhs: QuantizedTensor,
        rhs: QuantizedTensor,
        call: MatmulCall,
        *,
        add_to: Array | None = None,
    ) -> tuple[str | Attempt, ...]:
        """How to multiply: the backends that were timed, fastest first, then `names`."""
        timed = () if self.timings is None else self.timings.choose(lhs, rhs, call, add_to=add_to)
        return (*timed, *names)

    def attempts_of_one(
        self,
        lhs: QuantizedTensor,
        rhs: QuantizedTensor,
        call: MatmulCall,
        *,
        add_to: Array | None = None,
    ) -> tuple[str | Attempt, ...]:
        """`attempts` of a matmul without a recipe."""
        if self.matmuls is not None:
            return (self.matmuls,)
        seconds: dict[str, float] = {}
        if self.chip is not None:
            batch, m, k = call.geometry.lhs.matrix_shape(lhs.shape)
            _, n, _ = call.geometry.rhs.matrix_shape(rhs.shape)
            sides = Side.of(lhs), Side.of(rhs)
            tiles = [s.granularity.along(2)[1] for s in sides if s.granularity.in_tiles]
            tile = max(tiles, default=None)
            seconds = matmul_seconds(sides, self.chip, (batch * m, k, n), tile)
        return self.attempts(best(seconds), lhs, rhs, call, add_to=add_to)

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in ("casts", "matmuls")}
        words = [] if self.chip is None else [repr(self.chip)]
        words += [f"{name}={value!r}" for name, value in fields.items() if value is not None]
        # Timings are long.
        words += [] if self.timings is None else [f"timings={type(self.timings).__name__}(...)"]
        return f"Kernels({', '.join(words)})"


def check_kernels(kernels: object) -> Kernels:
    """The kernels that a user gives; None is `Kernels()`.

    Raises:
      TypeError: for anything else.

    Example:
      >>> check_kernels(None)
      Kernels()
    """
    if kernels is None:
        return PORTABLE
    if isinstance(kernels, Kernels):
        return kernels
    raise TypeError(
        f"kernels={kernels!r} is of type {type(kernels).__name__}, but Kernels are needed; write "
        f"kernels={cure_of(kernels)}."
    )


PORTABLE = Kernels()
NO_SHAPE: Shape = (0, 0, 0)
"""For `Kernels.backends` without a chip, where shapes do not matter."""
