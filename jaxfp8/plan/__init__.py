"""Plans: which kernels run, what a recipe costs on a chip, and which recipe a layer gets."""

from jaxfp8.kernels._timings import Timings as Timings
from jaxfp8.plan._autotune import autotune as autotune
from jaxfp8.plan._choices import Choice as Choice
from jaxfp8.plan._choices import Choices as Choices
from jaxfp8.plan._roofline import roofline as roofline
from jaxfp8.plan._roofline import skip_slow as skip_slow
