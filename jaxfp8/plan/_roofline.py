"""`roofline`: the estimated time of a layer, dense or of experts. `skip_slow`, which reads it.

Letters: M tokens, K features in, N features out. A layer computes y [M, N] = x [M, K] @ w [K, N].
"""

import dataclasses
from numbers import Integral
from typing import Any

from jaxfp8._check import check_int, check_number
from jaxfp8._typing import Matmul
from jaxfp8.kernels._dispatch import Chip, Route, chip_named, kernels_of
from jaxfp8.kernels.grouped_matmul import _api as grouped_matmul
from jaxfp8.plan._backends import (
    SMALLEST,
    check_shape,
    grouped_backends,
    matmul_sizes,
    rows_wasted,
    tile_rows,
    value_counts,
)
from jaxfp8.plan._costs import (
    MATMULS,
    PEAKS,
    Cost,
    Shape,
    cast_cost,
    kernel,
    matmul_cost,
    route_of,
    sides_of,
)
from jaxfp8.plan._kernels import Kernels, check_kernels
from jaxfp8.recipes._presets import identity
from jaxfp8.recipes._recipe import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The cost of one matmul, or of all casts, in bfloat16 and in the recipe."""

    bf16: Cost
    recipe: Cost
    how: str  # for tables: the route of the matmul, or bytes for each value that is cast

    @property
    def speedup(self) -> float:
        """Time in bfloat16 / time in the recipe."""
        return self.bf16.seconds / self.recipe.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """An estimate of one layer (M, K, N), forward and backward. `str()` is a table."""

    shape: Shape
    recipe: str
    chip: str
    fprop: Part
    dgrad: Part
    wgrad: Part
    casts: Part  # with amaxes and transpositions; none in bfloat16
    groups: int | None = None

    @property
    def total(self) -> Part:
        """The sum of the three matmuls and the casts."""
        parts = (self.fprop, self.dgrad, self.wgrad, self.casts)
        bf16 = sum((part.bf16 for part in parts), Cost())
        return Part(bf16=bf16, recipe=sum((part.recipe for part in parts), Cost()), how="")

    @property
    def speedup(self) -> float:
        """Time in bfloat16 / time in the recipe. Below 1 the recipe is slower."""
        return self.total.speedup

    def __str__(self) -> str:
        m, k, n = self.shape
        of_groups = "" if self.groups is None else f"{self.groups}, "
        lines = [
            f"[{m}, {k}] @ [{of_groups}{k}, {n}], {self.recipe} on {self.chip}: "
            f"{self.speedup:.2f}x of bf16's speed, estimated",
            f"{'':6}{'GFLOP':>8}{'bf16 MB':>10}{'bf16 us':>10}{'MB':>10}{'us':>10}  how",
        ]
        for name in (*MATMULS, "casts", "total"):
            part: Part = getattr(self, name)
            numbers = "".join(
                f"{cost.bytes / 1e6:10.1f}{cost.seconds * 1e6:10.1f}"
                for cost in (part.bf16, part.recipe)
            )
            gflop = part.recipe.flops / 1e9
            lines.append(f"{name:6}{gflop:8.0f}{numbers}  {part.how}".rstrip())
        return "\n".join(lines)


def roofline(
    shape: Shape, *, recipe: Recipe, kernels: Kernels, weight_casts: float = 1.0,
    groups: int | None = None,
) -> Roofline:  # fmt: skip
    """Estimate how long a dense layer takes in a recipe and in bfloat16, forward and backward.

    Nothing runs. One H200 measured a speed of layers that was 1.2 to 1.3 times lower ("When FP8
    pays" in docs/). A kernel takes `max(flops / peak, bytes / bandwidth)`, plus a launch. Peak and
    bandwidth are figures of data sheets, times the share that large kernels attain.

    The kernels are those of `kernels.choices(recipe, shape)`, compiled with
    `kernels.compiler_options(recipe)`. All tensors are bfloat16, and nothing else is fused with a
    cast. Not counted: random bits, communication, rematerialization. "When FP8 pays" says which
    scales and which padding count.

    Args:
      shape: (M, K, N) of y [M, N] = x [M, K] @ w [K, N] on one device.
      recipe: a Recipe, made of the quantizers of `fp8.quantizers`.
      kernels: for "h200", "h100", "b200", "l4", "l40s", "a100", "tpu7x", "v6e", "v5p" or "v5e".
      weight_casts: how often w is cast in a forward and backward pass. It is 2 under
        `fp8.save_fp8_residuals()`, and 1 / 8 if `fp8.quantize_params` casts w once for 8
        microbatches. It is 0 for FP8 primary weights, which the optimizer casts.
      groups: the number of groups of `fp8.ragged_dot`, each with its own w. M is then the number of
        rows of all groups. Groups of average size are assumed, padded by half a tile. In bfloat16
        one kernel multiplies all groups, without padding. Default: None, a dense layer.

    Returns:
      A frozen dataclass. `speedup` is bf16 time / recipe time. `fprop`, `dgrad`, `wgrad`, `casts`
      and `total` each have `bf16`, `recipe` and `how`. `bf16` and `recipe` each have `bytes`,
      `flops` and `seconds`. `print` shows a table.

    Raises:
      ValueError: for a shape that is not three positive integers, kernels without a chip, a chip
        without figures (cpu, mi300x), the backend "reference", a quantizer that is not one of
        `fp8.quantizers`, or a number of casts outside 0 to 1000.
      TypeError: if `recipe` is not a Recipe, or if `kernels` is not a Kernels.

    Example:
      >>> import jaxfp8 as fp8
      >>> shape, h200 = (8192, 4096, 14336), fp8.Kernels("h200")
      >>> print(fp8.plan.roofline(shape, recipe=fp8.recipes.delayed(), kernels=h200))
      [8192, 4096] @ [4096, 14336], delayed on h200: 1.76x of bf16's speed, estimated
               GFLOP   bf16 MB   bf16 us        MB        us  how
      fprop      962     419.4    1248.5     327.2     625.3  FP8
      dgrad      962     419.4    1248.5     243.3     625.3  FP8
      wgrad      962     419.4    1248.5     268.4     625.3  FP8
      casts        0       0.0       0.0    1048.6     249.4  x 5, w 5, g 5 bytes a value
      total     2886    1258.3    3745.5    1887.4    2125.2

    References:
      Williams, Waterman, Patterson, Roofline, CACM 52 (2009).
      torchao, torchao/testing/training/roofline_utils.py.
      TransformerEngine, GEMM profiling: measured on an H200 NVL over a 5B model's layers, delayed
      1.69x and current 1.58x.
    """
    chip = check_estimable(kernels)
    needed = "the number of casts of w in a forward and backward pass, 0 to 1000"
    casts_of_w = check_number("weight_casts", weight_casts, needed, least=0, most=1000)
    number, plain, padded = 1, shape, shape
    if groups is None:
        choices = kernels.choices(recipe, shape)
        names = {part: getattr(choices, part).backend for part in (*MATMULS, "x", "w", "g")}
    else:
        number, (tokens, k, n) = check_groups(groups), check_shape(shape)
        found = grouped_backends(chip.name, kernels.casts, kernels.matmuls, recipe, shape, number)
        names = {part: by[0] for part, by in found._asdict().items()}
        # (M, K, N) of a group of average size, and with the rows that are multiplied for nothing.
        plain = -(-tokens // number), k, n
        tile = tile_rows(tokens, number, recipe.whole_tiles, found)
        rows = plain[0] + rows_wasted(tile, found)
        padded = -(-rows // SMALLEST) * SMALLEST, k, n
    peak = PEAKS[chip.name]
    routes: dict[Matmul, Route] = {}
    parts: dict[str, Any] = {}
    for name in MATMULS:
        sides, size = sides_of(getattr(recipe, name)), matmul_sizes(padded)[name]
        routes[name] = route = route_of(sides, names[name], chip, size)
        bf16 = matmul_cost(peak, Route.PLAIN, matmul_sizes(plain)[name], groups=number)
        cost, how = matmul_cost(peak, route, size, sides, groups=number), route.value
        if groups is not None and names[name] not in kernels_of(chip, grouped_matmul.BACKENDS):
            cost, how = _loop_cost(recipe, name, route, chip, shape, number), f"{how}, in a loop"
        parts[name] = Part(bf16=bf16, recipe=cost, how=how)
    casts, said = Cost(), []
    for tensor, count in value_counts(padded).items():
        of_tensor = recipe, tensor, number * count, routes, chip
        cost = cast_cost(names[tensor], *of_tensor)
        if tensor == "w":
            cost = cost.times(casts_of_w)
            if casts_of_w < 1:
                cost += cast_cost("xla", *of_tensor, held=True)
        casts += cost
        if cost.bytes:
            said.append(f"{tensor} {cost.bytes / (number * count):.3g}")
    how = f"{', '.join(said)} bytes a value" if said else "none"
    parts["casts"] = Part(bf16=Cost(), recipe=casts, how=how)
    return Roofline(shape=shape, recipe=recipe.name, chip=chip.name, groups=groups, **parts)


def _loop_cost(
    recipe: Recipe, name: Matmul, route: Route, chip: Chip, shape: Shape, groups: int
) -> Cost:
    """The cost of XLA's loop over tiles of rows, for one of the three matmuls of experts."""
    tokens, k, n = shape
    rows = tile_rows(tokens, groups, recipe.whole_tiles)  # without casts in Pallas
    peak, size = PEAKS[chip.name], matmul_sizes((rows, k, n))[name]
    one = matmul_cost(peak, route, size, sides_of(getattr(recipe, name)))
    # A step takes the matrix of a group, multiplies a tile, and writes its rows. In wgrad it reads
    # the float32 product of a tile and the sum, and writes the sum in float32 and bfloat16.
    written = rows * (n if name == "fprop" else k)
    moved = (4 + 4 + 4 + 2) * k * n if name == "wgrad" else 2 * k * n + 4 * written
    return (one + kernel(peak, moved, launches=2)).times(tokens // rows + groups)


def check_groups(groups: object) -> int:
    """The number of groups, or ValueError."""
    if isinstance(groups, bool) or not isinstance(groups, Integral) or groups < 1:
        raise ValueError(f"groups={groups!r} must be a positive integer, the number of experts.")
    return int(groups)


def check_estimable(kernels: Kernels) -> Chip:
    """The chip to estimate for, or ValueError."""
    given = check_kernels(kernels)
    if given.chip is None:
        raise ValueError(
            f'kernels={kernels!r} names no chip to estimate for. Write fp8.Kernels("h200").'
        )
    if "reference" in (given.casts, given.matmuls):
        raise ValueError(f"kernels={given!r}: the backend 'reference' is for tests. Leave it out.")
    if given.chip not in PEAKS:
        raise ValueError(
            f"chip={given.chip!r} has no figures to estimate from. jaxfp8 has compiled nothing for "
            f"its FP8 units. Use one of {sorted(PEAKS)}."
        )
    return chip_named(given.chip)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipSlow:
    """A rule that leaves a matmul in high precision where FP8 is estimated to be slower.

    `rule(path, shape, recipe)` returns the recipe that the matmul should use. It is the given one,
    or `identity()` with the reason in its name. Each call prints its choice in one line. The rule
    is hashable, and makes the same choice in every process.

    Args:
      kernels: the `fp8.Kernels` of the layers, for the chip that the program will run on.
      at_least: the least `fp8.plan.roofline(...).speedup` that keeps the recipe. It leaves out the
        operations around the matmul, so pass more than 1 to be safe.
      tokens: M, the tokens that one device multiplies at once. Shapes are then those of weights,
        (K, N). Default: None, shapes are (M, K, N).

    Raises:
      ValueError: for kernels without a chip, and for a chip without figures. Also if `at_least` or
        `tokens` is not positive.
      TypeError: if `kernels` is not a Kernels.

    Example:
      >>> import jaxfp8 as fp8
      >>> from jaxfp8.linen import FP8Dense
      >>> h200, recipe = fp8.Kernels("h200"), fp8.recipes.current()
      >>> rule = fp8.plan.skip_slow(kernels=h200)
      >>> up = FP8Dense(14336, recipe=rule("up", (8192, 4096, 14336), recipe), kernels=h200)
      skip_slow: up [8192, 4096] @ [4096, 14336]: current estimated 1.719x on h200, kept
      >>> gate = FP8Dense(64, recipe=rule("gate", (8192, 4096, 64), recipe))
      skip_slow: gate [8192, 4096] @ [4096, 64]: current estimated 0.517x on h200, below 1: identity
      >>> gate.recipe.name
      'identity (skip_slow: current 0.517x on h200)'

    References:
      torchao, `_auto_filter_for_recipe`, a filter by fixed shapes.
    """

    kernels: Kernels
    at_least: float = 1.0
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_estimable(self.kernels)
        needed = "bf16 time / FP8 time, a positive number: 1.0 for break-even"
        check_number("at_least", self.at_least, needed)
        if self.tokens is not None:
            check_int("tokens", self.tokens, "None, for shapes (M, K, N), or an integer")

    def __call__(self, path: str, shape: tuple[int, ...], recipe: Recipe) -> Recipe:
        """`recipe`, or identity with the reason in its name. One printed line names `path`."""
        given = () if self.tokens is None else (self.tokens,)
        if not isinstance(shape, tuple) or len(given) + len(shape) != 3:
            needed = "(K, N), since the rule has tokens" if given else "(M, K, N), or pass tokens="
            raise ValueError(f"shape={shape!r} of {path!r} does not fit. It must be {needed}.")
        m, k, n = size = check_shape((*given, *shape))
        speedup = roofline(size, recipe=recipe, kernels=self.kernels).speedup
        slow = speedup < self.at_least and not recipe.is_identity
        found = f"{speedup:.3f}x on {self.kernels.chip}"
        print(
            f"skip_slow: {path} [{m}, {k}] @ [{k}, {n}]: {recipe.name} estimated {found}, "
            + (f"below {self.at_least:g}: identity" if slow else "kept")
        )
        skipped = f"identity (skip_slow: {recipe.name} {found})"
        return dataclasses.replace(identity(), name=skipped) if slow else recipe


skip_slow = SkipSlow
