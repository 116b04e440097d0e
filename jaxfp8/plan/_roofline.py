"""`roofline`: the estimated time of a layer, dense or of experts.

The counts follow programs that XLA compiles for a layer, forward and backward in one program (jax
0.10.2 and 0.12, for H200, B200 and A100). `tests/deviceless/test_roofline_traffic.py` compares the
counts with such programs.

Letters: M tokens, K features in, N features out. A layer computes y [M, N] = x [M, K] @ w [K, N].
"""

import dataclasses
from numbers import Integral
from typing import Any

from jaxfp8._typing import Matmul
from jaxfp8.kernels._dispatch import Chip, Route, chip_named, kernels_of
from jaxfp8.kernels.grouped_matmul import _api as grouped_matmul
from jaxfp8.plan._backends import (
    SMALLEST,
    grouped_backends,
    matmul_sizes,
    row_counts,
    tile_rows,
    value_counts,
)
from jaxfp8.plan._cast_costs import MATRICES, Casts, cast_cost, copies_of, wants_contracted_last
from jaxfp8.plan._choices import Footnotes
from jaxfp8.plan._costs import (
    LAUNCH,
    MATMULS,
    Cost,
    Shape,
    check_shape,
    gemm_cost,
    matmul_cost,
    route_of,
    sides_of,
    stream_cost,
)
from jaxfp8.plan._kernels import Kernels, check_kernels
from jaxfp8.plan._peaks import PEAKS, Peak
from jaxfp8.recipes._recipe import Recipe

# The result of `roofline`: the cost of each matmul and of all casts, and a table of them.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The cost of one matmul, or of all casts, in a layer in bfloat16 and in the recipe.

    `how` is text for tables: the route of the matmul, or bytes for each value that is cast.
    """

    bf16: Cost
    recipe: Cost
    how: str

    @property
    def speedup(self) -> float:
        """Time in bfloat16 / time in the recipe."""
        return self.bf16.seconds / self.recipe.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """An estimate of one layer (M, K, N), forward and backward. `str()` is a table.

    `casts` are amaxes, casts to FP8 and transpositions of x, w and g. In bfloat16 there are none.
    `groups` is None for a dense layer.
    """

    shape: Shape
    recipe: str
    chip: str
    fprop: Part
    dgrad: Part
    wgrad: Part
    casts: Part
    groups: int | None = None

    @property
    def total(self) -> Part:
        """The sum of the three matmuls and the casts."""
        parts = (self.fprop, self.dgrad, self.wgrad, self.casts)
        bf16, recipe = (
            sum((getattr(part, side) for part in parts), Cost()) for side in ("bf16", "recipe")
        )
        return Part(bf16=bf16, recipe=recipe, how="")

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
        notes = Footnotes()
        for name in (*MATMULS, "casts", "total"):
            part = getattr(self, name)
            how = part.how
            if name in MATMULS and (detail := how.partition(", ")[2]):
                how = notes.shorten(how, [detail])
            numbers = (
                part.recipe.flops / 1e9, part.bf16.bytes / 1e6, part.bf16.seconds * 1e6,
                part.recipe.bytes / 1e6, part.recipe.seconds * 1e6,
            )  # fmt: skip
            lines.append(
                f"{name:6}{numbers[0]:8.0f}"
                + "".join(f"{x:10.1f}" for x in numbers[1:])
                + f"  {how}"
            )
        return "\n".join(line.rstrip() for line in [*lines, *notes.lines()])


# Grouped matmuls: what they cost.
#
# Letters: T rows (tokens) in E groups (experts); a group [T_e, K] @ [K, N].


def _cost_of_groups(of_group: Cost, groups: int) -> Cost:
    """The cost of one kernel for all groups, from that of a group of average size."""
    whole = of_group.times(groups)
    return Cost(whole.bytes, whole.flops, round(whole.seconds - (groups - 1) * LAUNCH, 15))


def _loop_cost(
    recipe: Recipe, name: Matmul, backend: str, chip: str, shape: Shape, groups: int
) -> Cost:
    """The cost of XLA's loop over tiles for one of the three matmuls.

    A step takes the matrix of a group, multiplies a tile by `backend`, and writes its rows. In
    wgrad it adds the product of a tile to a sum in float32, and writes the sum as it is then.
    """
    tokens, k, n = shape
    rows = tile_rows(tokens, groups, recipe.whole_tiles)  # without casts in Pallas
    steps = tokens // rows + groups
    peak: Peak = PEAKS[chip]
    size = matmul_sizes((rows, k, n))[name]
    one = matmul_cost(
        sides_of(getattr(recipe, name)), backend, chip_named(chip), peak, size, recipe.tile
    )
    if name == "wgrad":
        # The float32 product and sum are read, and the sum is written in float32 and in bfloat16.
        one += stream_cost(peak, (4 + 4 + 4 + 2) * k * n, kernels=2)
    else:
        written = rows * (n if name == "fprop" else k)
        one += stream_cost(peak, 2 * k * n + 4 * written, kernels=2)
    return one.times(steps)


def _group_sizes_of(shape: Shape, groups: int, rows: int) -> Shape:
    """(M, K, N) of a group of average size, with half a tile of padding.

    With padding M is a multiple of 16, as tiles are, so no operand is padded again.
    """
    tokens, k, n = shape
    padded = -(-tokens // groups) + rows // 2
    return -(-padded // SMALLEST) * SMALLEST if rows else padded, k, n


# What w costs if it is not cast once for each forward and backward pass.
#
# Letters: K features in, N features out; w is [K, N].


def _check_weight_casts(given: object) -> float:
    """Raise ValueError unless it is a number of casts, 0 or more."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1000:
        raise ValueError(
            f"weight_casts={given!r} must be the number of casts of w in each forward and backward "
            "pass: 1, or 1 / 8 if fp8.quantize_params casts it once for 8 microbatches."
        )
    return float(given)


def _cost_of_weights(cast: Cost, casts: Casts, number: float) -> Cost:
    """The cost of w in one forward and backward pass, in which w is cast `number` times.

    Below 1 the model holds the FP8 copies. They lie as w does, so matmuls that want another layout
    or dtype still transpose or widen them.
    """
    if number >= 1:
        return cast.times(number)
    cost = cast.times(number)
    for (quantizer, _), readers in copies_of(casts.recipe, "w").items():
        routes = {name: casts.routes[name] for name in readers}
        if any(
            MATRICES.axes(name, "w").is_transposed
            and route.reads_fp8
            and wants_contracted_last(route, casts.chip)
            for name, route in routes.items()
        ):
            cost += stream_cost(casts.peak, 2 * casts.values)
        widened = sum(not route.reads_fp8 for route in routes.values())
        if widened:  # tiles are widened once for both matmuls
            both = 1 if quantizer.granularity.in_tiles else widened
            cost += stream_cost(casts.peak, (1 + 2 * both) * casts.values)
    return cost


# What a recipe costs on a chip: its three matmuls and its casts.

_OF_32 = 32


def roofline(
    shape: Shape, *, recipe: Recipe, kernels: Kernels, weight_casts: float = 1.0,
    groups: int | None = None,
) -> Roofline:  # fmt: skip
    """Estimate how long a dense layer takes in a recipe and in bfloat16, forward and backward.

    The result is an estimate. Nothing is measured, and nothing runs. One H200 measured a speed of
    layers that was 1.2 to 1.3 times lower ("When FP8 pays" in docs/).

    A kernel takes `max(flops / peak, bytes / bandwidth)`, plus a launch. A step takes the sum of
    its kernels. Peak and bandwidth are figures of data sheets, times the share that large kernels
    attain. `plan/_peaks.py` and `plan/_costs.py` have every figure with its source.

    The estimate assumes:
      - x, w and g are bfloat16, and so are y, dx and dw. Other operations that use an operand (a
        norm before, a sum after) are not fused with its cast. Both passes are compiled into one
        program, with `kernels.compiler_options(recipe)`.
      - The kernels that `kernels.choices(recipe, shape)` names cast and multiply.
      - XLA casts as it does today. An amax reads a tensor once. Scales of rows and of tiles along
        one axis need one amax for each direction. In delayed scaling the cast computes the amax
        without another read. Static scaling has no amax. One kernel then casts the tensor in all
        directions.
      - Ada and Hopper multiply FP8 with the contracted axis last on both sides. So w is transposed
        for fprop, and x and g are transposed for wgrad. The cast does this; in delayed scaling it
        is done after the cast. Blackwell needs it for block-scaled matmuls only.
      - XLA quantizes tiles at 1 TB/s. This was measured once, on a GB200.
      - The Pallas kernels of jaxfp8 attain 3/4 of the speed of kernels of others. An H200 measured
        0.79 for fprop of tiles of 128, and 0.53 to 0.58 for wgrad. With tiles of 32, Hopper's
        matmul reaches 0.38 of bfloat16's rate, and 0.69 if the tiles of the right operand are
        squares. An H200 measured both.
      - Random bits cost nothing. Stochastic rounding draws them in the cast, so its casts take
        longer than estimated. Nobody has timed by how much.
      - XLA multiplies tiles in bfloat16, and in a loop if scales are float32. With scales of rows
        it reads and writes the result once more. A chip without FP8 units multiplies in bfloat16.
        A matmul with one row or column is no FP8 call. Sizes are padded as each matmul needs it.
      - XLA splits the contracted axis of a small matmul in bfloat16. Its float32 sums are written
        and read.
      - Quantizer state is in its steady state. There is no communication and no rematerialization.
        The GPU keeps its clocks and does nothing else.

    Args:
      shape: (M, K, N) on one device: tokens, features in, features out. The layer computes
        y [M, N] = x [M, K] @ w [K, N].
      recipe: a Recipe, made of the quantizers of `fp8.quantizers`.
      kernels: for "h200", "h100", "b200", "l4", "l40s" or "a100". `fp8.Kernels("h200", casts="xla",
        matmuls="xla")` estimates XLA's program without other kernels.
      weight_casts: how often w is cast in a forward and backward pass. 1 is the default of a
        matmul. It is 2 under `fp8.save_fp8_residuals()`, which casts w again. It is 1 / 8 if
        `fp8.quantize_params` casts it once for 8 microbatches, and 0 for FP8 primary weights, which
        the optimizer casts.
      groups: the number of groups of `fp8.ragged_dot`. M is then the number of rows of all groups,
        each with its own w. Groups of average size are assumed, padded by half a tile. In bfloat16
        one kernel multiplies all groups, without padding. Default: None, a dense layer.

    Returns:
      A frozen dataclass. `speedup` is bf16 time / recipe time. `fprop`, `dgrad`, `wgrad`, `casts`
      and `total` each have `bf16`, `recipe` and `how`. `bf16` and `recipe` each have `bytes`,
      `flops` and `seconds`. `print` shows a table.

    Raises:
      ValueError: for a shape that is not three positive integers, kernels without a chip, or a
        number of casts below 0. Also
        for a chip without figures (cpu, tpu, mi300x), for the backend "reference", and for a
        quantizer that is not one of `fp8.quantizers`.
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
      >>> small, recipe = (8192, 1024, 1024), fp8.recipes.current()
      >>> fp8.plan.roofline(small, recipe=recipe, kernels=h200).speedup < 1
      True

    References:
      Williams, Waterman, Patterson, Roofline, CACM 52 (2009).
      torchao, torchao/testing/training/roofline_utils.py.
      TransformerEngine, GEMM profiling: measured on an H200 NVL over a 5B model's layers, delayed
      1.69x and current 1.58x.
    """
    chip = check_estimable(kernels)
    if groups is not None:
        return _of_groups(shape, recipe, kernels, weight_casts, chip, check_groups(groups))
    choices = kernels.choices(recipe, shape)
    described, peak = chip_named(chip), PEAKS[chip]
    by_triton = bool(kernels.compiler_options(recipe).get("xla_gpu_enable_triton_gemm", True))
    sizes, values, rows = matmul_sizes(shape), value_counts(shape), row_counts(shape)
    routes: dict[Matmul, Route] = {}
    parts: dict[str, Any] = {}
    for name in MATMULS:
        sides, backend = sides_of(getattr(recipe, name)), getattr(choices, name).backend
        routes[name] = route_of(sides, backend, described, sizes[name])
        parts[name] = Part(
            bf16=gemm_cost(peak, *sizes[name], by_triton=True),
            recipe=matmul_cost(
                sides, backend, described, peak, sizes[name], recipe.tile, by_triton=by_triton
            ),
            how=routes[name].value,
        )
    casts_of = {
        tensor: Casts(recipe, tensor, count, rows[tensor], routes, described, peak)
        for tensor, count in values.items()
    }
    each = {
        tensor: cast_cost(getattr(choices, tensor).backend, casts)
        for tensor, casts in casts_of.items()
    }
    each["w"] = _cost_of_weights(each["w"], casts_of["w"], _check_weight_casts(weight_casts))
    how = ", ".join(
        f"{tensor} {cost.bytes / values[tensor]:.3g}" for tensor, cost in each.items() if cost.bytes
    )
    part = Part(
        bf16=Cost(),
        recipe=sum(each.values(), Cost()),
        how=f"{how} bytes a value" if how else "none",
    )
    return Roofline(shape=shape, recipe=recipe.name, chip=chip, casts=part, **parts)


def _of_groups(
    shape: Shape, recipe: Recipe, kernels: Kernels, weight_casts: float, chip: str, groups: int
) -> Roofline:
    """The estimate of a grouped matmul."""
    tokens, _, _ = check_shape(shape)
    described, peak = chip_named(chip), PEAKS[chip]
    names = grouped_backends(chip, kernels.casts, kernels.matmuls, recipe, shape, groups)
    rows = tile_rows(tokens, groups, recipe.whole_tiles, names)
    average, padded = (_group_sizes_of(shape, groups, tile) for tile in (0, rows))
    routes: dict[Matmul, Route] = {}
    parts: dict[str, Any] = {}
    for name in MATMULS:
        sides, backend = sides_of(getattr(recipe, name)), getattr(names, name)[0]
        size = matmul_sizes(padded)[name]
        routes[name] = route_of(sides, backend, described, size)
        how = routes[name].value
        if backend in kernels_of(described, grouped_matmul.BACKENDS):
            if recipe.tile == _OF_32:  # the kernel reads square tiles as tiles of 1x32
                sides = sides[0], sides[1]._replace(granularity=sides[0].granularity)
            cost = _cost_of_groups(
                matmul_cost(sides, backend, described, peak, size, recipe.tile), groups
            )
        else:
            cost, how = _loop_cost(recipe, name, backend, chip, shape, groups), f"{how}, in a loop"
        bf16 = _cost_of_groups(gemm_cost(peak, *matmul_sizes(average)[name]), groups)
        parts[name] = Part(bf16=bf16, recipe=cost, how=how)
    values = {tensor: groups * count for tensor, count in value_counts(padded).items()}
    counts = {tensor: groups * count for tensor, count in row_counts(padded).items()}
    each: dict[str, Cost] = {}
    for tensor, count in values.items():
        casts = Casts(recipe, tensor, count, counts[tensor], routes, described, peak)
        each[tensor] = cast_cost(getattr(names, tensor)[0], casts)
        if tensor == "w":
            each["w"] = _cost_of_weights(each["w"], casts, _check_weight_casts(weight_casts))
    how = ", ".join(
        f"{tensor} {cost.bytes / values[tensor]:.3g}"  # type: ignore[index]
        for tensor, cost in each.items()
        if cost.bytes
    )
    casts_part = Part(
        bf16=Cost(),
        recipe=sum(each.values(), Cost()),
        how=f"{how} bytes a value" if how else "none",
    )
    return Roofline(
        shape=shape, recipe=recipe.name, chip=chip, casts=casts_part, groups=groups, **parts
    )


def check_groups(groups: object) -> int:
    """The number of groups. ValueError unless it is a positive integer."""
    if isinstance(groups, bool) or not isinstance(groups, Integral) or groups < 1:
        raise ValueError(f"groups={groups!r} must be a positive integer, the number of experts.")
    return int(groups)


def _estimable(name: str) -> Chip:
    """The chip of that name. ValueError for an unknown chip, or one without figures."""
    chip = chip_named(name)
    if name not in PEAKS:
        raise ValueError(
            f"chip={name!r} has no figures to estimate from. jaxfp8 has compiled nothing for FP8 "
            f"units of platform {chip.platform}. Use one of {sorted(PEAKS)}."
        )
    return chip


def check_estimable(kernels: Kernels) -> str:
    """The name of the chip to estimate for.

    ValueError for kernels without a chip, for a chip without figures, and for "reference".
    """
    given = check_kernels(kernels)
    if given.chip is None:
        raise ValueError(
            f'kernels={kernels!r} names no chip to estimate for. Write fp8.Kernels("h200").'
        )
    if "reference" in (given.casts, given.matmuls):
        raise ValueError(f"kernels={given!r}: the backend 'reference' is for tests. Leave it out.")
    return _estimable(given.chip).name
