"""Whole models in FP8, by rules: `fp8.convert` and what it returns."""

from jaxfp8.conversion._coverage import Coverage as Coverage
from jaxfp8.conversion._coverage import CoverageRow as CoverageRow
from jaxfp8.conversion._function import FP8Function as FP8Function
from jaxfp8.conversion._rule import Rule as Rule
