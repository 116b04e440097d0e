"""The options with which XLA compiles a recipe to the intended kernels and numbers."""

from jaxfp8.kernels._dispatch import chip_named
from jaxfp8.recipes._recipe import Operands, Recipe


def compiler_options(recipe: Recipe, chip: str) -> dict[str, bool | str]:
    """See `fp8.Kernels.compiler_options`.

    Example:
      >>> import jaxfp8 as fp8
      >>> compiler_options(fp8.recipes.blockwise(), "h200")
      {'xla_allow_excess_precision': False}
    """
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
