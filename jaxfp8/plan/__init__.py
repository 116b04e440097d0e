"""What to run: what a recipe costs on a chip, and which recipe a layer gets by that."""

from jaxfp8.plan._roofline import roofline as roofline
from jaxfp8.plan._rules import skip_slow as skip_slow
