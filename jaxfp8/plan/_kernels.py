"""`Kernels`: which kernels cast and multiply. It is the only argument that depends on the chip."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from jaxfp8._geometry import Geometry
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
from jaxfp8.plan._choices import Choices, choices_of
from jaxfp8.plan._costs import MATMULS, Shape, Side
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Operands, Recipe

# The backends that a user can name in each field of `Kernels`.
_TABLES: dict[str, Mapping[str, Backend]] = {"casts": CASTS, "matmuls": BACKENDS}


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


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which kernels cast and multiply, for one chip or for every chip.

    Every layer, op and plug takes it as `kernels=`. A cast of one array has the same bits with all
    kernels. Results of matmuls differ in the order of their additions.

    `Kernels()` is the default: XLA computes everything, on every chip. With `Kernels("h200")` a
    matmul uses a kernel that is made for that chip if it is estimated to be faster than XLA's
    program. Tiles are cast by Pallas, without an estimate. XLA does what a kernel cannot do.
    `print(kernels.choices(recipe, shape))` shows each choice and its reason.

    - Tiles on Hopper ("h100", "h200"): casts and matmuls in Pallas, which needs jax 0.11.
    - Tiles on Blackwell ("b200"): casts in Pallas, and matmuls of cuDNN if scales are powers of
      two.
    - Scales of tensors and of rows, on GPUs with FP8 units ("l4" and "l40s" too): casts by XLA, and
      matmuls by cuBLASLt, which XLA calls with `compiler_options`.
    - TPUs: casts and matmuls by XLA. Only "tpu7x" multiplies FP8, with scales of tensors and of
      rows. Others gain memory and bytes on the wire ("TPUs" in docs/).
    - Experts (`fp8.ragged_dot`): on Hopper a grouped matmul in Pallas. On "tpu7x" one in Pallas for
      scales of tensors, and XLA's own for those of rows. Else a loop over tiles of rows, with
      matmuls as above.

    An estimate uses the shape on one device. In an Auto mesh it uses the global shape, because the
    traced program has no other. `fp8.plan.autotune` times the matmuls of a step on your GPU.

    On other platforms, for instance on a CPU, XLA computes what the kernels would compute. On a GPU
    other than the named one the program may not compile.

    Attributes:
      chip: "h100", "h200", "b200", "l4", "l40s", "a100", "mi300x", "tpu7x", "v6e", "v5p", "v5e",
        "cpu", or None for every chip. jaxfp8 never detects the chip, so all processes compile the
        same program.
      casts: name of the backend of all casts: "xla", "mosaic" (Pallas), "triton", or "reference"
        (for tests). If a named backend cannot do a case, it raises an error. None: Pallas for tiles
        on Hopper and Blackwell, else XLA.
      matmuls: name of the backend of all matmuls: "xla", "mosaic", "cudnn" or "reference". None:
        by estimates.
      timings: measured times of matmuls, from `fp8.plan.autotune`. A matmul with a time uses its
        fastest backend. Other matmuls and all casts are chosen as without timings.

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

        Kernels are traced to find out whether they can do their case. So the table is valid for
        the installed versions of jax and its packages.

        Args:
          recipe: which quantizer for which operand.
          shape: (M, K, N) of y [M, N] = x [M, K] @ w [K, N] on one device.
          dtype: dtype of x, w and y.

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
        mesh = jax.sharding.get_abstract_mesh()
        return choices_of(self, recipe, check_shape(shape), jnp.dtype(dtype), mesh)

    def compiler_options(self, recipe: Recipe) -> dict[str, bool | str]:
        """The options with which XLA compiles a recipe to the intended kernels and numbers.

        Pass them as `jax.jit(step, compiler_options=)`. They hold for the whole compiled function.
        The dict is empty on platforms other than NVIDIA's, and for recipes without FP8 matmuls.

        - `xla_gpu_enable_triton_gemm=False`: FP8 dots, and the other matmuls of the function,
          become calls of cuBLASLt. XLA's Triton emitter would dequantize FP8.
        - `xla_allow_excess_precision=False`: every conversion to bfloat16 in the function rounds.
          It is left out if a matmul reads float32 scales of whole tensors.
        - `xla_disable_hlo_passes="all-reduce-contiguous"`, if amaxes span devices: XLA does not
          copy them into one array to send them.

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
        # Out of that array a kernel takes each amax. In a scanned Llama with delayed scaling these
        # are one kernel in ten.
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
        """Names of backends of a cast of so many `values`, with a granularity for each copy."""
        if self.casts is not None:
            return (self.casts,)
        return casting_backends(self.chip, granularities, values)

    def for_matmul(
        self, lhs: QuantizedTensor, rhs: QuantizedTensor, geometry: Geometry
    ) -> tuple[str, ...]:
        """Names of backends of a matmul without a recipe."""
        if self.matmuls is not None:
            return (self.matmuls,)
        batch, m, k = geometry.lhs.matrix_shape(lhs.shape)
        _, n, _ = geometry.rhs.matrix_shape(rhs.shape)
        one, other = (Side(True, each.granularity, each.power_of_two) for each in (lhs, rhs))
        return faster_than_xla(matmul_seconds((one, other), self.chip, (batch * m, k, n)))

    def attempts(
        self, names: Iterable[str], lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall, *,
        add_to: Array | None = None,
    ) -> tuple[str | Attempt, ...]:  # fmt: skip
        """The backends to try: those that were timed, fastest first, and then `names`."""
        timed = () if self.timings is None else self.timings.choose(lhs, rhs, call, add_to=add_to)
        return (*timed, *names)

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in ("casts", "matmuls")}
        words = [] if self.chip is None else [repr(self.chip)]
        words += [f"{name}={value!r}" for name, value in fields.items() if value is not None]
        # Timings would fill the error messages that show `Kernels`.
        words += [] if self.timings is None else [f"timings={type(self.timings).__name__}(...)"]
        return f"Kernels({', '.join(words)})"


def check_kernels(kernels: object) -> Kernels:
    """The argument `kernels=`, or TypeError. None becomes `Kernels()`."""
    if kernels is None:
        return _PORTABLE
    if isinstance(kernels, Kernels):
        return kernels
    chip = kernels if isinstance(kernels, str) and kernels in CHIPS else "h200"
    raise TypeError(
        f"kernels={kernels!r} is of type {type(kernels).__name__}, but Kernels are needed. Write "
        f"kernels=fp8.Kernels({chip!r})."
    )


def _reads_float32_scales(operands: Operands) -> bool:
    # XLA finds the scale of a whole tensor only in the dtype of the dequantized operand. Without
    # excess precision it rounds the scale to that dtype, bfloat16, by up to 0.2 %.
    both = operands.lhs, operands.rhs
    in_one = all(quantizer.granularity.in_one for quantizer in both)
    return in_one and not all(quantizer.has_exact_scales for quantizer in both)


_PORTABLE = Kernels()
