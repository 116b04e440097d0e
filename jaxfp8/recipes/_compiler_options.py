"""The options under which XLA compiles a recipe as it is meant."""

from jaxfp8.kernels._platform import chip_named
from jaxfp8.recipes._operands import Operands
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe


def compiler_options(recipe: Recipe, chip: str) -> dict[str, bool]:
    """The compiler options of a recipe on a chip, for `jax.jit(..., compiler_options=)`.

    `xla_gpu_enable_triton_gemm=False`: by default XLA gives FP8 dots to its Triton emitter, which
    dequantizes them. Without that emitter they become `__cublas$lt$matmul$f8` calls. The option
    holds for the whole compiled function: its other matmuls go to cuBLASLt as well. Tiles on Hopper
    multiply in bfloat16 all the same, unless a kernel is asked for.

    `xla_allow_excess_precision=False`: every conversion to bfloat16 in the function rounds. FP8
    casts do not need this option. It is left out if a matmul reads float32 scales of whole tensors.
    With it, XLA would round those scales to bfloat16 before cuBLASLt, by up to 0.2 % each, since it
    recognizes a scale only in the dtype of the dequantized operand.

    Args:
      recipe: a Recipe.
      chip: its name ("h200", "b200", "l40s", "cpu", ...). An argument, never detected.

    Returns:
      A dict. It is empty if XLA needs no option: on other platforms than NVIDIA's, for recipes
      without FP8 matmuls, and for float32 scales of whole tensors on GPUs without FP8 units.

    Raises:
      ValueError: for an unknown chip, or another GPU than the recipe is made for.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.compiler_options(fp8.recipes.delayed(), "h200")
      {'xla_gpu_enable_triton_gemm': False}
      >>> fp8.compiler_options(fp8.recipes.blockwise(), "h200")
      {'xla_allow_excess_precision': False}
      >>> fp8.compiler_options(fp8.recipes.delayed(), "cpu")
      {}
    """
    check_recipe(recipe)
    described = chip_named(chip)
    if recipe.chip not in (None, chip) and described.platform == "cuda":
        raise ValueError(
            f"chip={chip!r}, but recipe {recipe.name!r} is made for chip={recipe.chip!r}: its "
            "matmuls would not run well on another GPU; make a recipe for the chip, or without "
            "chip=."
        )
    in_fp8 = [
        operands for operands in (recipe.fprop, recipe.dgrad, recipe.wgrad) if operands.in_fp8
    ]
    if described.platform != "cuda" or not in_fp8:
        return {}
    options = {}
    if described.fp8_matmul and not all(operands.in_tiles for operands in in_fp8):
        options["xla_gpu_enable_triton_gemm"] = False
    if not any(_reads_float32_scales(operands) for operands in in_fp8):
        options["xla_allow_excess_precision"] = False
    return options


def _reads_float32_scales(operands: Operands) -> bool:
    """Whether a matmul reads scales of whole tensors that bfloat16 may not hold."""
    both = operands.lhs, operands.rhs
    in_one = all(quantizer.granularity.in_one for quantizer in both)
    return in_one and not all(quantizer.has_exact_scales for quantizer in both)
