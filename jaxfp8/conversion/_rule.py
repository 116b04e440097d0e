"""`Rule`: which layers get which recipe, and the errors for rules that match nothing."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from jaxfp8._call import check_options
from jaxfp8.conversion._layer import Layer
from jaxfp8.ops._options import LayerOptions
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe

Matcher: TypeAlias = str | type | Callable[[str, tuple[int, ...]], bool]


@dataclasses.dataclass(frozen=True, init=False)
class Rule:
    """The recipe of the layers that a matcher selects.

    A pair `(match, recipe)` in the argument `rules=` of `fp8.convert` is the same.

    Attributes:
      match: a regular expression that the whole path of a layer must match ("decoder/.*/mlp/.*").
        Or a class, for its instances. Or a function `match(path, shape) -> bool`, where shape is
        (M, K, N).
      recipe: the recipe of these layers. None leaves them in high precision.
      options: the options of their matmuls, as sorted pairs.

    Raises:
      TypeError: for another matcher, no recipe, or an unknown option.
      ValueError: for an invalid regular expression.

    Example:
      >>> import jaxfp8 as fp8
      >>> Rule("encoder/.*", fp8.recipes.blockwise(), kernels=fp8.Kernels("h200")).match
      'encoder/.*'
    """

    match: Matcher
    recipe: Recipe | None
    options: tuple[tuple[str, Any], ...] = ()

    def __init__(self, match: Matcher, recipe: Recipe | None, **options: Any) -> None:
        """Make a rule.

        Args:
          match: see the attribute.
          recipe: see the attribute.
          **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`: see
            `fp8.dot_general`.
        """
        if isinstance(match, str):
            try:
                re.compile(match)
            except re.error as error:
                raise ValueError(
                    f"rule {match!r} is no regular expression: {error}. Escape special characters "
                    "with a backslash."
                ) from None
        elif not callable(match):
            raise TypeError(
                f"rule {match!r} is of type {type(match).__name__}. Write a regular expression of "
                "paths, a class, or a function of (path, shape)."
            )
        if recipe is not None:
            check_recipe(recipe)
        check_options("a rule", LayerOptions, options)
        object.__setattr__(self, "match", match)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "options", tuple(sorted(options.items())))

    def matches(self, layer: Layer) -> bool:
        """Whether the rule selects a layer.

        Raises:
          TypeError: if a function of the user returns anything but a bool.
        """
        if isinstance(self.match, str):
            return re.fullmatch(self.match, layer.path) is not None
        if isinstance(self.match, type):
            return issubclass(layer.type, self.match)
        if not layer.shape:
            return False  # an embedding, for instance. A function may rely on (M, K, N)
        found = self.match(layer.path, layer.shape)
        if not isinstance(found, bool):
            raise TypeError(
                f"rule {self.called} returned {found!r} for layer {layer.path!r}, but a bool is "
                "needed."
            )
        return found

    @property
    def called(self) -> str:
        """How messages and the coverage table name the rule."""
        if isinstance(self.match, str):
            return repr(self.match)
        return getattr(self.match, "__qualname__", repr(self.match))


def read_rules(rules: Iterable[Rule | tuple[Matcher, Recipe | None]]) -> tuple[Rule, ...]:
    """The rules, with pairs as rules.

    Example:
      >>> [rule.called for rule in read_rules([("mlp/.*", None)])]
      ["'mlp/.*'"]
    """
    if isinstance(rules, Rule | str) or not isinstance(rules, Iterable):
        raise TypeError(
            f"rules={rules!r} must be a sequence of pairs (match, recipe), for instance "
            'rules=[("decoder/.*", fp8.recipes.blockwise())].'
        )

    def one(given: Any) -> Rule:
        if isinstance(given, Rule):
            return given
        if not isinstance(given, tuple) or len(given) != 2:
            raise TypeError(
                f"rules holds {given!r}. Each rule is an fp8.conversion.Rule or a pair "
                "(match, recipe)."
            )
        return Rule(*given)

    return tuple(map(one, rules))


def check_used(rules: Sequence[Rule], layers: Sequence[Layer]) -> None:
    """Raise ValueError for a rule that decides no layer, or that names one which cannot run FP8."""
    first = {layer: next((r for r in rules if r.matches(layer)), None) for layer in layers}
    for rule in rules:
        matched = [layer for layer in layers if rule.matches(layer)]
        if not matched:
            raise ValueError(f"rule {rule.called} matches no layer. {_nearest(rule, layers)}")
        mine = [layer for layer in matched if first[layer] is rule]
        if not mine:
            earlier = first[matched[0]]
            raise ValueError(
                f"rule {rule.called} decides no layer: earlier rules match all of its layers, "
                f"{earlier.called if earlier else ''} for instance {matched[0].path!r}. The first "
                "match wins, so put the narrower rule first."
            )
        if rule.recipe is None or rule.recipe.is_identity:
            continue
        able = [layer for layer in mine if layer.can_be_fp8]
        for layer in mine:
            # A wide pattern may include embeddings and convolutions. The table then says why they
            # were left alone. A rule that names one layer, or that is left with none, is a mistake.
            if not layer.can_be_fp8 and (not able or rule.match == layer.path):
                raise ValueError(
                    f"rule {rule.called} gives recipe {rule.recipe.name!r} to layer "
                    f"{layer.path!r}, of type {layer.type.__name__}, which cannot take it: "
                    f"{layer.obstacle}. Narrow the rule."
                )


def _nearest(rule: Rule, layers: Sequence[Layer]) -> str:
    paths = [layer.path for layer in layers]
    if isinstance(rule.match, str):
        near = difflib.get_close_matches(rule.match, paths, n=3, cutoff=0.0)
        inner = [path for path in paths if re.search(rule.match, path)]
        hint = f" A rule must match the whole path: write '.*{rule.match}.*'." if inner else ""
        return f"The nearest paths are {near}.{hint}"
    if isinstance(rule.match, type):
        return f"The types are {sorted({layer.type.__name__ for layer in layers})}."
    return f"The paths are {paths[:8]}."
