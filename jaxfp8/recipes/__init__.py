"""Recipes: the quantizers of the operands of the three matmuls of a training step."""

from jaxfp8.recipes._presets import blockwise as blockwise
from jaxfp8.recipes._presets import current as current
from jaxfp8.recipes._presets import delayed as delayed
from jaxfp8.recipes._presets import get as get
from jaxfp8.recipes._presets import identity as identity
from jaxfp8.recipes._presets import mxfp8 as mxfp8
from jaxfp8.recipes._presets import rowwise as rowwise
from jaxfp8.recipes._presets import static as static
from jaxfp8.recipes._recipe import Operands as Operands
from jaxfp8.recipes._recipe import Recipe as Recipe
from jaxfp8.recipes._text import from_dict as from_dict
from jaxfp8.recipes._text import parse as parse
from jaxfp8.recipes._text import to_dict as to_dict
from jaxfp8.recipes._text import to_string as to_string
