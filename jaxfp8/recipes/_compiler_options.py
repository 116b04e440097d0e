"""What XLA has to be told so that the matmuls of a recipe run in FP8."""

from jaxfp8.kernels._platform import chip_named
from jaxfp8.recipes._recipe import Recipe


def compiler_options(recipe: Recipe, chip: str) -> dict[str, bool]:
    """Options for `jax.jit(..., compiler_options=)` under which XLA runs the recipe's matmuls in FP8.

    By default XLA gives FP8 dots to its Triton emitter, which dequantizes them; without that emitter they become
    `__cublas$lt$matmul$f8` calls. The option holds for the whole compiled function: its other matmuls go to cuBLASLt
    as well.

    Args:
      recipe: a Recipe.
      chip: its name ("h200", "b200", "l40s", "cpu", ...). An argument, never detected.

    Returns:
      A dict, empty where nothing has to be said (no FP8 hardware, or a recipe without matmuls for cuBLASLt: identity, tiles).

    Raises:
      ValueError: for an unknown chip, or another GPU than the recipe is made for.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.compiler_options(fp8.recipes.delayed(), "h200")
      {'xla_gpu_enable_triton_gemm': False}
      >>> fp8.compiler_options(fp8.recipes.delayed(), "cpu")
      {}
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe={recipe!r} is no Recipe; make one with fp8.recipes, for instance fp8.recipes.delayed()."
        )
    described = chip_named(chip)
    if recipe.chip not in (None, chip) and described.platform == "cuda":
        raise ValueError(
            f"chip={chip!r}, but recipe {recipe.name!r} is made for chip={recipe.chip!r}: its matmuls would not run well on "
            "another GPU; make a recipe for the chip, or without chip=."
        )
    if (
        described.platform == "cuda"
        and described.fp8_matmul
        and any(operands.in_fp8 and not operands.in_tiles for operands in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    ):
        return {"xla_gpu_enable_triton_gemm": False}
    return {}
