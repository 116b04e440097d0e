"""`Kernels`: which kernels cast and multiply.

It is the only argument that depends on the chip.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType, Matmul
from jaxfp8.kernels._dispatch import CHIPS, Attempt, Backend, Chip, chip_named
from jaxfp8.kernels._timings import Timings
from jaxfp8.kernels.cast._api import BACKENDS as CASTS
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._formats import FLOAT_DTYPES
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.plan._backends import (
    Backends,
    backends_for,
    casting_backends,
    check_shape,
    faster_than_xla,
    matmul_seconds,
)
from jaxfp8.plan._choices import Choices, explain_choices
from jaxfp8.plan._costs import MATMULS, Shape, Side
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Operands, Recipe

# The backends that a user can name, and the chips that each backend is made for.

_TABLES: dict[str, Mapping[str, Backend]] = {"casts": CASTS, "matmuls": BACKENDS}
"""The backends that each field of `fp8.Kernels` takes."""


def _check_named(chip: Chip | None, field: str, name: object) -> None:
    """Raise ValueError for an unknown backend, or for one that is not made for the chip."""
    if name is None:
        return
    if not isinstance(name, str) or name not in _TABLES[field]:
        raise ValueError(
            f"{field}={name!r} is no backend of {field}. Use None or one of "
            f"{sorted(_TABLES[field])}."
        )
    row = _TABLES[field][name]
    if not row.families or (chip is not None and chip.family in row.families):
        return
    # Without a chip, other platforms run `elsewhere`. A backend that has none would compile there
    # too, to a slow program. So nothing later would refuse it.
    if chip is None and row.elsewhere is not None:
        return
    given = None if chip is None else chip.name
    fitting = next(other.name for other in CHIPS.values() if other.family in row.families)
    raise ValueError(
        f"{field}={name!r} is made for {' and '.join(row.families)}, but chip={given!r}. Leave "
        f'{field} out, or write for instance fp8.Kernels("{fitting}").'
    )


# What a user writes: `Kernels`, and the check of an argument `kernels=`.


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which kernels cast and multiply, for one chip or for every chip.

    Every layer, op and plug takes it as `kernels=`. A recipe decides which numbers are computed.
    `Kernels` decides which kernels compute them. A cast of one array has the same bits with all
    kernels. Results of matmuls differ in the order of their additions.

    `Kernels()` is the default: XLA computes everything, on every chip. `Kernels("h200")` uses a
    kernel that is made for that chip if it is estimated to be faster than XLA's program, and can do
    the case. `print(kernels.choices(recipe, shape))` shows each choice and its reason.

    - Tiles on Hopper ("h100", "h200"): Pallas casts and block-scaled Pallas matmuls.
    - Tiles on Blackwell ("b200"): Pallas casts. With power-of-two scales, block-scaled matmuls of
      cuDNN.
    - Scales of tensors and of rows, on GPUs with FP8 units ("l4" and "l40s" too): casts by XLA, and
      matmuls by cuBLASLt, which XLA calls with `compiler_options`.
    - Experts (`fp8.ragged_dot`): on Hopper a grouped Pallas matmul for all FP8 scales. Elsewhere a
      loop over tiles of rows, whose matmuls are chosen as above.
    - All other cases: XLA. The Pallas kernels need jax 0.11 or later.

    These choices are estimated. One H200 has timed the Pallas kernels, and they are slower than the
    estimates ("When FP8 pays" in docs/). `fp8.plan.autotune` times the matmuls of a step on your
    GPU. An estimate uses the shape on one device. In an Auto mesh it uses the global shape, because
    the traced program has no other.

    The same program runs on other platforms than CUDA, for instance on a CPU. There XLA computes
    what the kernels would compute. On a GPU other than the named one it may not compile.

    Attributes:
      chip: "h100", "h200", "b200", "l4", "l40s", "a100", "mi300x", "tpu", "cpu", or None for every
        chip. jaxfp8 never detects the chip, so all processes compile the same program.
      casts: name of the backend of all casts: "xla", "mosaic" (Pallas), "triton", or "reference"
        (for tests). If a named backend cannot do a case, it raises an error. Default: None, the
        choice above.
      matmuls: name of the backend of all matmuls: "xla", "mosaic", "cudnn" or "reference". Default:
        None, the choice above.
      timings: measured times of matmuls, from `fp8.plan.autotune`. A matmul with a time uses its
        fastest backend. Estimates choose for other matmuls, and for casts, which are not timed.

    Raises:
      ValueError: for an unknown chip or backend, or a backend that is not made for the chip. Also
        for timings of another chip, or timings beside `matmuls`.
      TypeError: if `timings` is not a `fp8.plan.Timings`.

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
    timings: Timings | None = None

    def __post_init__(self) -> None:
        chip = None if self.chip is None else chip_named(self.chip)
        _check_named(chip, "casts", self.casts)
        _check_named(chip, "matmuls", self.matmuls)
        if self.timings is None:
            return
        # `autotune` records matmuls with an object of its own, which chooses too.
        if isinstance(self.timings, type) or not hasattr(self.timings, "choose"):
            raise TypeError(
                f"timings={self.timings!r} must be fp8.plan.Timings. Write for instance "
                "timings=fp8.plan.Timings.load(path)."
            )
        if self.matmuls is not None:
            raise ValueError(
                f"matmuls={self.matmuls!r} and timings both choose matmuls. Leave one out."
            )
        measured = getattr(self.timings, "chip", self.chip)
        if measured != self.chip:
            raise ValueError(
                f"timings are of chip {measured!r}, but chip={self.chip!r}. Write "
                f"fp8.Kernels({measured!r}, timings=timings), or measure on this chip."
            )

    def choices(self, recipe: Recipe, shape: Shape, dtype: DType = jnp.bfloat16) -> Choices:
        """Which backend runs each cast and each matmul of a layer, and why. `print` shows a table.

        The table is valid for x [M, K] and w [K, N] on one device, and for the installed versions
        of jax and its packages: kernels are traced to find out whether they can do their case.

        Args:
          recipe: which quantizer for which operand.
          shape: (M, K, N) on one device: tokens, features in, features out. The layer computes
            y [M, N] = x [M, K] @ w [K, N].
          dtype: dtype of x, w and y. Default: bfloat16.

        Returns:
          `fp8.plan.Choices`, with a `fp8.plan.Choice` for each cast and each matmul.

        Raises:
          TypeError: if `recipe` is not a Recipe, or if `dtype` cannot be quantized.
          ValueError: for a shape that is not three positive integers.
          NotImplementedError: if a named kernel cannot do the case.

        Example:
          >>> import jaxfp8 as fp8
          >>> print(fp8.Kernels("l4").choices(fp8.recipes.delayed(), (8192, 4096, 4096)))
          delayed, [8192, 4096] @ [4096, 4096], Kernels('l4')
          part    backend    known by   why
          cast x  xla        estimated  611.9 us [1]
          cast w  xla        estimated  307.9 us [1]
          cast g  xla        estimated  611.9 us [1]
          fprop   xla        estimated  1455.2 us, FP8 [1]
          dgrad   xla        estimated  1455.2 us, FP8 [1]
          wgrad   xla        estimated  1455.2 us, FP8 [1]
          [1] no other kernel is considered
        """
        check_recipe(recipe)
        if jnp.dtype(dtype).name not in FLOAT_DTYPES:
            raise TypeError(
                f"dtype={dtype!r} cannot be quantized. Use one of {list(FLOAT_DTYPES)}."
            )
        return explain_choices(self, recipe, check_shape(shape), jnp.dtype(dtype))

    def compiler_options(self, recipe: Recipe) -> dict[str, bool | str]:
        """The options with which XLA compiles a recipe to the intended kernels and numbers.

        Pass them as `jax.jit(step, compiler_options=)`. They hold for the whole compiled function.

        `xla_gpu_enable_triton_gemm=False`: by default XLA gives FP8 dots to its Triton emitter,
        which dequantizes them. Without that emitter they become `__cublas$lt$matmul$f8` calls. The
        other matmuls of the function go to cuBLASLt as well.

        `xla_allow_excess_precision=False`: every conversion to bfloat16 in the function rounds. FP8
        casts do not need this option. It is left out if a matmul reads float32 scales of whole
        tensors. There the option would make XLA round those scales to bfloat16 before cuBLASLt, by
        up to 0.2 % each. XLA recognizes a scale only in the dtype of the dequantized operand.

        `xla_disable_hlo_passes="all-reduce-contiguous"`: XLA joins the all-reduces of amaxes, and
        sends each as it is. By default it copies them into one array, and starts a kernel for each
        result. In a scanned Llama that is one kernel in ten of delayed scaling. The option is for
        recipes with amaxes that span devices.

        The dict is empty on platforms other than NVIDIA's, and for recipes without FP8 matmuls. On
        GPUs without FP8 units `xla_gpu_enable_triton_gemm` is left out.

        Raises:
          ValueError: if `chip` is None.
          TypeError: if `recipe` is not a Recipe.

        Example:
          >>> import jaxfp8 as fp8
          >>> fp8.Kernels("h200").compiler_options(fp8.recipes.blockwise())
          {'xla_allow_excess_precision': False}
          >>> fp8.Kernels("cpu").compiler_options(fp8.recipes.delayed())
          {}
        """
        check_recipe(recipe)
        if self.chip is None:
            raise ValueError(
                f"{self!r} names no chip, but compiler options depend on the chip. Write for "
                'instance fp8.Kernels("h200").'
            )
        chip, matmuls = chip_named(self.chip), (recipe.fprop, recipe.dgrad, recipe.wgrad)
        in_fp8 = [operands for operands in matmuls if operands.in_fp8]
        options: dict[str, bool | str] = {}
        if chip.platform != "cuda" or not in_fp8:
            return options
        if chip.fp8_matmul and not all(operands.in_tiles for operands in in_fp8):
            # With tiles only, XLA has no FP8 dot that could become a cuBLASLt call.
            options["xla_gpu_enable_triton_gemm"] = False
        if not any(_reads_float32_scales(operands) for operands in in_fp8):
            options["xla_allow_excess_precision"] = False
        if recipe.combines_amaxes or recipe.tensors_in_rows:
            options["xla_disable_hlo_passes"] = "all-reduce-contiguous"
        return options

    def backends(self, recipe: Recipe, shape: Shape) -> Backends:
        """Names of backends for each matmul and cast of a layer (M, K, N) on one device."""
        return backends_for(self.chip, self.casts, self.matmuls, recipe, shape)

    def by_xla(self, names: Backends) -> frozenset[Matmul]:
        """The matmuls that XLA computes. None is certain if timings choose."""
        if self.timings is not None:
            return frozenset()
        return frozenset(name for name in MATMULS if getattr(names, name)[0] == "xla")

    def for_cast(
        self, granularities: tuple[AbstractGranularity, ...], values: int
    ) -> tuple[str, ...]:
        """Names of backends of a cast without a recipe, in the order of trial.

        `granularities` has one for each copy. `values` is the number of values of the array.
        """
        if self.casts is not None:
            return (self.casts,)
        return casting_backends(self.chip, granularities, values)

    def attempts(
        self,
        names: Iterable[str],
        lhs: QuantizedTensor,
        rhs: QuantizedTensor,
        call: MatmulCall,
        *,
        add_to: Array | None = None,
    ) -> tuple[str | Attempt, ...]:
        """The backends to try: those that were timed, fastest first, and then `names`."""
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
        """The backends to try for a matmul without a recipe, such as `fp8.scaled_matmul`."""
        if self.matmuls is not None:
            return (self.matmuls,)
        batch, m, k = call.geometry.lhs.matrix_shape(lhs.shape)
        _, n, _ = call.geometry.rhs.matrix_shape(rhs.shape)
        one, other = (Side(True, each.granularity, each.power_of_two) for each in (lhs, rhs))
        seconds = matmul_seconds((one, other), self.chip, (batch * m, k, n))
        return self.attempts(faster_than_xla(seconds), lhs, rhs, call, add_to=add_to)

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in ("casts", "matmuls")}
        words = [] if self.chip is None else [repr(self.chip)]
        words += [f"{name}={value!r}" for name, value in fields.items() if value is not None]
        # Timings would fill the error messages that show `Kernels`.
        words += [] if self.timings is None else [f"timings={type(self.timings).__name__}(...)"]
        return f"Kernels({', '.join(words)})"


def check_kernels(kernels: object) -> Kernels:
    """Check an argument `kernels=`, or raise TypeError. None becomes `Kernels()`."""
    if kernels is None:
        return _PORTABLE
    if isinstance(kernels, Kernels):
        return kernels
    chip = kernels if isinstance(kernels, str) and kernels in CHIPS else "h200"
    raise TypeError(
        f"kernels={kernels!r} is of type {type(kernels).__name__}, but Kernels are needed. Write "
        f"for instance kernels=fp8.Kernels({chip!r})."
    )


def _reads_float32_scales(operands: Operands) -> bool:
    """Whether a matmul reads scales of whole tensors that bfloat16 would round."""
    both = operands.lhs, operands.rhs
    in_one = all(quantizer.granularity.in_one for quantizer in both)
    return in_one and not all(quantizer.has_exact_scales for quantizer in both)


_PORTABLE = Kernels()
NO_SHAPE: Shape = (0, 0, 0)
"""An argument for `Kernels.backends` without a chip, for which the shape does not matter."""
