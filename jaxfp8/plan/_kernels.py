"""`Kernels`: which kernels cast and multiply.

It is the only argument that depends on the chip.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType
from jaxfp8.kernels._dispatch import CHIPS, Attempt, Backend, Chip, chip_named
from jaxfp8.kernels.cast._api import BACKENDS as CASTS
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._formats import FLOAT_DTYPES
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.plan._backends import (
    XLA,
    Backends,
    backends_for,
    copy_seconds,
    faster_than_xla,
    matmul_seconds,
)
from jaxfp8.plan._choices import Choices, explain_choices
from jaxfp8.plan._costs import Shape, Side, check_shape
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Operands, Recipe

# The backends that a user can name, and the chips that each backend is made for.

_TABLES: dict[str, Mapping[str, Backend]] = {"casts": CASTS, "matmuls": BACKENDS}
"""The backends that each field of `fp8.Kernels` takes."""


def _check_named(casts: object, matmuls: object, chip: Chip | None) -> None:
    """Raise ValueError for an unknown backend, or for one that is not made for the chip.

    None is valid: then the user names no backend, or no chip.
    """
    for field, name in (("casts", casts), ("matmuls", matmuls)):
        if name is None:
            continue
        if not isinstance(name, str) or name not in _TABLES[field]:
            raise ValueError(
                f"{field}={name!r} is no backend of {field}. Use None or one of "
                f"{sorted(_TABLES[field])}."
            )
        _check_made_for(chip, field, name)


def _check_made_for(chip: Chip | None, field: str, name: str) -> None:
    """Raise ValueError for a backend that is written for other chips."""
    row = _TABLES[field][name]
    if not row.families or (chip is not None and chip.family in row.families):
        return
    given, others = None if chip is None else chip.name, _chips_of(row)
    why = f"{field}={name!r} is made for {' and '.join(row.families)}, but chip={given!r}."
    if row.elsewhere is None:
        # XLA compiles it for every chip, to a slow program. So nothing later would refuse.
        raise ValueError(
            f"{why} XLA has no such matmul for other chips. Write "
            f'fp8.Kernels("{others[0].name}"), or leave {field} out.'
        )
    if chip is None:
        return
    if field == "casts" and row.platform == "cuda":
        needed = min(other.compute_capability or (0, 0) for other in others)
        has = ".".join(map(str, chip.compute_capability or ("none",)))
        why = (
            f"casts={name!r} needs compute capability {needed[0]}.{needed[1]}, but "
            f"chip={given!r} has {has}."
        )
    raise ValueError(f"{why} Leave {field} out.")


def _chips_of(backend: Backend) -> list[Chip]:
    """The chips that a backend is written for."""
    return [chip for chip in CHIPS.values() if chip.family in backend.families]


def _cure_of(kernels: object) -> str:
    """The code to write instead of a value that is not `fp8.Kernels`, for messages."""
    if not isinstance(kernels, str):
        return 'fp8.Kernels("h200")'
    rows = {field: table[kernels] for field, table in _TABLES.items() if kernels in table}
    words = [f"{field}={kernels!r}" for field in rows]
    # A chip, for a backend that does not go without.
    words[:0] = [
        repr(_chips_of(row)[0].name) for row in rows.values() if row.families and not row.elsewhere
    ]
    return f"fp8.Kernels({', '.join(words) or repr(kernels)})"


# The options with which XLA compiles a recipe to the intended kernels and numbers.


def _compiler_options(recipe: Recipe, chip: str) -> dict[str, bool | str]:
    """See `fp8.Kernels.compiler_options`."""
    described = chip_named(chip)
    in_fp8 = [
        operands for operands in (recipe.fprop, recipe.dgrad, recipe.wgrad) if operands.in_fp8
    ]
    if described.platform != "cuda" or not in_fp8:
        return {}
    options: dict[str, bool | str] = {}
    if described.fp8_matmul and not all(operands.in_tiles for operands in in_fp8):
        # With tiles only, XLA has no FP8 dot that could become a cuBLASLt call.
        options["xla_gpu_enable_triton_gemm"] = False
    if not any(_reads_float32_scales(operands) for operands in in_fp8):
        options["xla_allow_excess_precision"] = False
    if recipe.combines_amaxes or recipe.tensors_in_rows:
        # XLA joins the all-reduces of amaxes. This pass then copies all operands into one array,
        # and each result out of it, with a kernel for each result.
        options["xla_disable_hlo_passes"] = "all-reduce-contiguous"
    return options


def _reads_float32_scales(operands: Operands) -> bool:
    """Whether a matmul reads scales of whole tensors that bfloat16 would round."""
    both = operands.lhs, operands.rhs
    in_one = all(quantizer.granularity.in_one for quantizer in both)
    return in_one and not all(quantizer.has_exact_scales for quantizer in both)


# What a user writes: `Kernels`, and the check of an argument `kernels=`.


@runtime_checkable
class Chooser(Protocol):
    """An object that ranks the backends of a matmul, as `fp8.plan.Timings` does."""

    def choose(self, *args: Any, **kwargs: Any) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Names of backends, fastest first, each with its extra arguments. It gets the matmul's."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which kernels cast and multiply, for one chip or for every chip.

    Every layer, op and plug takes it as `kernels=`. A recipe decides which numbers are computed.
    `Kernels` decides which kernels compute them. A cast of one array has the same bits with all
    kernels. Results of matmuls differ in the order of their additions.

    `Kernels()` is the default: XLA computes everything, on every chip.

    `Kernels("h200")` uses a kernel that is made for that chip if it is estimated to be faster than
    XLA's program. `print(kernels.choices(recipe, shape))` shows each choice and its reason.

    - Tiles on Hopper ("h100", "h200"): Pallas casts and block-scaled Pallas matmuls.
    - Tiles on Blackwell ("b200"): Pallas casts. With power-of-two scales, block-scaled matmuls of
      cuDNN.
    - Scales of tensors and of rows, on GPUs with FP8 units ("l4" and "l40s" too): casts by XLA, and
      matmuls by cuBLASLt. XLA calls cuBLASLt if you pass `compiler_options`. Hopper's Pallas matmul
      is used for these scales only by name or by timings.
    - Experts (`fp8.ragged_dot`): on Hopper a grouped Pallas matmul for all FP8 scales. Elsewhere a
      loop over tiles of rows, whose matmuls are chosen as above.
    - All other cases: XLA.

    These choices are estimated, not measured. One H200 has timed the Pallas kernels, and they are
    slower than the estimates ("When FP8 pays" in docs/).
    `fp8.plan.autotune` times the matmuls of a step on your GPU. An estimate uses the shape on one
    device. In an Auto mesh it uses the global shape, because the traced program has no other.

    If a kernel cannot do a case, XLA does it, and `choices` shows the reason. The Pallas kernels
    need jax 0.11 or later.

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
    timings: Chooser | None = None

    def __post_init__(self) -> None:
        chip = None if self.chip is None else chip_named(self.chip)
        _check_named(self.casts, self.matmuls, chip)
        if self.timings is None:
            return
        if isinstance(self.timings, type) or not isinstance(self.timings, Chooser):
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

        The table is valid for x [M, K] and w [K, N] on one device. It is also only valid for the
        installed versions of jax and its packages. Each kernel is traced to find out whether it can
        do its case.

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
          part    backend  known by   why
          cast x  xla      estimated  611.9 us [1]
          cast w  xla      estimated  307.9 us [1]
          cast g  xla      estimated  611.9 us [1]
          fprop   xla      estimated  1455.2 us, FP8 [1]
          dgrad   xla      estimated  1455.2 us, FP8 [1]
          wgrad   xla      estimated  1455.2 us, FP8 [1]
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

        Args:
          recipe: a Recipe.

        Returns:
          A dict. It is empty on platforms other than NVIDIA's, and for recipes without FP8 matmuls.
          On GPUs without FP8 units `xla_gpu_enable_triton_gemm` is left out.

        Raises:
          ValueError: if `chip` is None.
          TypeError: if `recipe` is not a Recipe.

        Example:
          >>> import jaxfp8 as fp8
          >>> fp8.Kernels("h200").compiler_options(fp8.recipes.static(
          ...     x_scale=0.1, w_scale=0.1, g_scale=0.1))
          {'xla_gpu_enable_triton_gemm': False}
          >>> fp8.Kernels("h200").compiler_options(fp8.recipes.delayed())["xla_disable_hlo_passes"]
          'all-reduce-contiguous'
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
        return _compiler_options(recipe, self.chip)

    def backends(self, recipe: Recipe, shape: Shape) -> Backends:
        """Names of backends for each matmul and cast of a layer (M, K, N) on one device."""
        return backends_for(self.chip, self.casts, self.matmuls, recipe, shape)

    def for_cast(
        self, granularities: tuple[AbstractGranularity, ...], values: int
    ) -> tuple[str, ...]:
        """Names of backends of a cast without a recipe, in the order of trial.

        `granularities` has one for each copy. `values` is the number of values of the array.
        """
        if self.casts is not None:
            return (self.casts,)
        return (
            XLA
            if self.chip is None
            else faster_than_xla(copy_seconds(granularities, self.chip, values))
        )

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
        seconds: dict[str, float] = {}
        if self.chip is not None:
            batch, m, k = call.geometry.lhs.matrix_shape(lhs.shape)
            _, n, _ = call.geometry.rhs.matrix_shape(rhs.shape)
            sides = Side.of(lhs), Side.of(rhs)
            tiles = [s.granularity.along(2)[1] for s in sides if s.granularity.in_tiles]
            tile = max(tiles, default=None)
            seconds = matmul_seconds(sides, self.chip, (batch * m, k, n), tile)
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
    raise TypeError(
        f"kernels={kernels!r} is of type {type(kernels).__name__}, but Kernels are needed. Write "
        f"kernels={_cure_of(kernels)}."
    )


_PORTABLE = Kernels()
NO_SHAPE: Shape = (0, 0, 0)
"""An argument for `Kernels.backends` without a chip, for which the shape does not matter."""
