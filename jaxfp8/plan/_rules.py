"""Rules: functions that choose the recipe of a matmul from its path, its shape and a recipe.

A rule is a pure function of static values. So it makes the same choice on every device and in every
process. jaxfp8 never calls a rule; the user calls it.

Letters: M tokens, K features in, N features out, on one device.
"""

import dataclasses

from jaxfp8.plan._kernels import Kernels
from jaxfp8.plan._roofline import check_estimable, roofline
from jaxfp8.recipes._presets import identity
from jaxfp8.recipes._recipe import Recipe

# The least speedup with which FP8 is kept: no loss, by an estimate that leaves out the operations
# around the matmul. torchao has a filter by fixed shapes (`_auto_filter_for_recipe`, measured on
# H100). For scales of tensors it skips K <= 4096 with N <= 1024. For scales of rows it skips N <=
# 2048, K <= 1024, or both small. An estimate also skips matmuls with few tokens.
_BREAK_EVEN = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipSlow:
    """The rule that `skip_slow` returns: `rule(path, shape, recipe)`.

    Attributes:
      kernels: `fp8.Kernels` for the chip of the estimates.
      at_least: the least speedup over bfloat16 that keeps the recipe.
      tokens: M of every matmul. None: each shape contains M.
    """

    kernels: Kernels
    at_least: float = _BREAK_EVEN
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_estimable(self.kernels)
        if type(self.at_least) not in (int, float) or not 0 < self.at_least < float("inf"):
            raise ValueError(
                f"at_least={self.at_least!r} must be a positive number, bf16 time / FP8 time. "
                "Write at_least=1.0 for break-even."
            )
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise ValueError(
                f"tokens={self.tokens!r} must be a positive integer. Write tokens=None if shapes "
                "are (M, K, N)."
            )

    def __call__(self, path: str, shape: tuple[int, ...], recipe: Recipe) -> Recipe:
        """`recipe`, or identity with the reason in its name. One printed line names `path`.

        `shape` is (M, K, N), or (K, N) for a rule that has `tokens`. ValueError for another shape,
        and as in `fp8.plan.roofline`.
        """
        if not isinstance(path, str):
            raise TypeError(
                f"path={path!r} must be a string: the name of the layer in the printed line. Write "
                'for instance path="up".'
            )
        m, k, n = size = self._size(path, shape)
        speedup = roofline(size, recipe=recipe, kernels=self.kernels).speedup
        slow = speedup < self.at_least and not recipe.is_identity
        found = f"{speedup:.3f}x on {self.kernels.chip}"
        print(
            f"skip_slow: {path} [{m}, {k}] @ [{k}, {n}]: {recipe.name} estimated {found}, "
            + (f"below {self.at_least:g}: identity" if slow else "kept")
        )
        return (
            dataclasses.replace(identity(), name=f"identity (skip_slow: {recipe.name} {found})")
            if slow
            else recipe
        )

    def _size(self, path: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
        expected = 3 if self.tokens is None else 2
        if not isinstance(shape, tuple) or len(shape) != expected:
            letters = (
                "(M, K, N), or give the rule tokens="
                if self.tokens is None
                else "(K, N), since the rule has tokens"
            )
            raise ValueError(f"shape={shape!r} of {path!r} does not fit. It must be {letters}.")
        m, k, n = shape if self.tokens is None else (self.tokens, *shape)
        return m, k, n


def skip_slow(
    *, kernels: Kernels, at_least: float = _BREAK_EVEN, tokens: int | None = None
) -> SkipSlow:
    """A rule that leaves a matmul in high precision where FP8 is estimated to be slower.

    `fp8.plan.roofline` makes the estimate. It counts casts, but not the random bits of stochastic
    rounding.

    `rule(path, shape, recipe)` returns the recipe that the matmul should use. It is the given one,
    or `identity()` with the reason in its name. Each call prints its choice in one line. The rule
    acts only where you call it.

    Args:
      kernels: the `fp8.Kernels` of the layers, for the chip that the program will run on.
      at_least: the least estimated bf16 time / FP8 time that keeps the recipe. Default: 1.0. An
        estimate leaves out the operations around the matmul, so pass more than 1 to be safe.
      tokens: M, the tokens that one device multiplies at once. Pass it if your code has only the
        shapes of weights. Shapes are then (K, N). Default: None, shapes are (M, K, N).

    Returns:
      The rule, a frozen and hashable dataclass.

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
      skip_slow: gate [8192, 4096] @ [4096, 64]: current estimated 0.631x on h200, below 1: identity
      >>> gate.recipe.name
      'identity (skip_slow: current 0.631x on h200)'
      >>> _ = fp8.plan.skip_slow(kernels=h200, tokens=256)("up", (4096, 14336), recipe)
      skip_slow: up [256, 4096] @ [4096, 14336]: current estimated 0.728x on h200, below 1: identity

    References:
      `fp8.plan.roofline`; torchao, `_auto_filter_for_recipe`, a filter by fixed shapes.
    """
    return SkipSlow(kernels=kernels, at_least=at_least, tokens=tokens)
