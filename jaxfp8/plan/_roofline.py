"""What a recipe costs on a chip: its three matmuls and its casts.

The counts are those of programs that XLA compiles a layer to (jax 0.10.2 and 0.12, for H200, B200
and A100), a layer's forward and backward pass in one program;
`tests/deviceless/test_roofline_traffic.py` holds them against such programs.

Letters: M tokens, K features in, N features out, of y [M, N] = x [M, K] @ w [K, N]; T the side of a
  tile.
"""

from jaxfp8._typing import Matmul
from jaxfp8.kernels._platform import chip_named
from jaxfp8.plan._backends import sizes_of, values_of
from jaxfp8.plan._cast_costs import Casts, cast_cost
from jaxfp8.plan._costs import PEAKS, Cost, Route, estimable, gemm
from jaxfp8.plan._kernels import Kernels, check_kernels
from jaxfp8.plan._report import MATMULS, Part, Roofline, Shape
from jaxfp8.plan._routes import matmul_cost, route_of, sides_of
from jaxfp8.recipes._recipe import Recipe


def roofline(shape: Shape, *, recipe: Recipe, kernels: Kernels) -> Roofline:
    """Estimate how long a dense layer takes in a recipe and in bfloat16, forward and backward.

    Nothing is measured, and nothing runs.

    A kernel takes `max(flops / peak, bytes / bandwidth)` and a launch; a step takes the sum of its
    kernels. Peak and bandwidth are those of data sheets, times what large kernels attain
    (`plan/_costs.py` has every figure with its source).

    Assumed:
      - x, w and g are bfloat16, and so are y, dx and dw. Whatever else uses an operand (a norm
        before, a sum after) is not fused with its cast. Both passes are compiled into one program,
        under `kernels.compiler_options(recipe)`.
      - The kernels that `kernels.choices(recipe, shape)` names cast and multiply.
      - XLA casts as it does today. An amax reads a tensor once (delayed scaling: not
        at all, it rides along with the cast; static: there is none); scales of rows and of tiles
        along one axis take one for each direction. One kernel then casts the tensor in all
        directions.
      - Ada and Hopper multiply FP8 with the contracted axis last on both sides: w for fprop, x and
        g for wgrad are transposed, in the cast, or (delayed scaling) after it. Blackwell needs that
        of block-scaled matmuls only.
      - XLA quantizes tiles at 1 TB/s, as it was measured once, on a GB200.
      - The kernels in Pallas attain 3/4 of the speed of kernels that were timed. No GPU has timed
        ours. With tiles of 32, Hopper's matmul reaches at most 0.67 of bfloat16's rate, or 1.6 of
        it if those of the right operand are squares.
      - Random bits cost nothing. Stochastic rounding draws them in the cast, so its casts take
        longer than estimated. Nobody has timed by how much.
      - XLA multiplies tiles in bfloat16; with float32 scales in a loop. With scales of rows it
        reads and writes the product once more. A chip without FP8 units multiplies in bfloat16. A
        matmul with one row or column is no FP8 call. Other sizes than multiples of 16 are padded.
      - Quantizer state is in its steady state. No communication, no remat; a GPU that keeps its
        clocks and does nothing else.

    Args:
      shape: (M, K, N) of y [M, N] = x [M, K] @ w [K, N] on one device: tokens, features in,
        features out.
      recipe: a Recipe, made of the quantizers of `fp8.quantizers`.
      kernels: for "h200", "h100", "b200", "l4", "l40s" or "a100". `fp8.Kernels("h200", casts="xla",
        matmuls="xla")` estimates what XLA alone makes of the recipe there.

    Returns:
      A frozen dataclass: `speedup` (bf16 time / recipe time), and `fprop`, `dgrad`, `wgrad`,
      `casts`, `total`, each with `bf16` and `recipe`, which have `bytes`, `flops` and `seconds`,
      and with `how`. `print` shows it as a table.

    Raises:
      ValueError: for a shape that is not three positive integers; kernels without a chip, or for
        one without figures (cpu, tpu, mi300x); the backend "reference"; a quantizer of a kind that
        is not known.
      TypeError: for a recipe that is none.

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
    choices = kernels.choices(recipe, shape)
    described, peak = chip_named(chip), PEAKS[chip]
    sizes, values = sizes_of(shape), values_of(shape)
    routes: dict[Matmul, Route] = {}
    parts: dict[str, Part] = {}
    for name in MATMULS:
        sides, backend = sides_of(getattr(recipe, name)), getattr(choices, name).backend
        routes[name] = route_of(sides, backend, described, sizes[name])
        parts[name] = Part(
            bf16=gemm(peak, *sizes[name]),
            recipe=matmul_cost(sides, backend, described, peak, sizes[name], recipe.tile),
            how=routes[name].value,
        )
    each = {
        tensor: cast_cost(
            getattr(choices, tensor).backend,
            Casts(recipe, tensor, count, routes, described, peak),
        )
        for tensor, count in values.items()
    }
    how = ", ".join(
        f"{tensor} {cost.bytes / values[tensor]:.3g}" for tensor, cost in each.items() if cost.bytes
    )
    casts = Part(
        bf16=Cost(),
        recipe=sum(each.values(), Cost()),
        how=f"{how} bytes a value" if how else "none",
    )
    return Roofline(shape=shape, recipe=recipe.name, chip=chip, casts=casts, **parts)


def check_estimable(kernels: Kernels) -> str:
    """The chip to estimate for.

    Raises:
      TypeError: for what are no kernels.
      ValueError: see `roofline`.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_estimable(fp8.Kernels("h200"))
      'h200'
    """
    given = check_kernels(kernels)
    if given.chip is None:
        raise ValueError(
            f'kernels={kernels!r} names no chip to estimate for; write fp8.Kernels("h200").'
        )
    if "reference" in (given.casts, given.matmuls):
        raise ValueError(f"kernels={given!r}: the backend 'reference' is for tests; leave it out.")
    return estimable(given.chip).name
