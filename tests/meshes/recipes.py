"""The recipes that the tests of meshes go through.

In tiles of 2, so that eight shards of 16 end where tiles do.
"""

from contracts.faces import in_tiles

import jaxfp8 as fp8

RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": in_tiles("blockwise", square=True, power_of_two=True),
    "mxfp8": in_tiles("mxfp8", square=False, scale_format=fp8.E8M0),
}
VARIANTS = {
    "rowwise_hp_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise_f32": in_tiles("blockwise", square=True),
    "mxfp8_2d": in_tiles("mxfp8", square=True, scale_format=fp8.E8M0),
}
ALL = RECIPES | VARIANTS
