"""`Rule`: which layers get which recipe, and what a rule sees of a model."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from jaxfp8._call import check_options
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.ops._einsum import parse_equation
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe

# `Layer`: what rules and the coverage table see of a layer.

LOOKUP = "an embedding, a lookup"
UNSEEN = "its code may multiply; inputs= shows whether"
UNCALLED = "not called with inputs="
FP8 = "an FP8 layer already"
"""Obstacles: why layers cannot run in FP8, or need not be converted. `jaxprs/_weights.py` has those
of matmuls that code of the model computes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a model, or a matmul of its own code, as rules and the coverage table see it.

    Letters: M tokens, K features in, N features out, B batch axes of the kernel.

    Attributes:
      path: names of modules from the model to the layer, joined by "/". For a matmul of the model's
        own code the path of its parameters; see `_read.row_path`.
      type: class of the layer, or of the module that holds the parameter.
      shape: (M, K, N) of its matmul, () if it has none.
      repeated: whether one call runs it for several layers of a stack, as in `nn.scan`.
      counted: whether example inputs gave M and `calls`. Otherwise both are 1.
      batch: B, the product of the axes that kernel and input share.
      calls: how often one pass calls the layer.
      parameters: for a matmul of the model's own code, the paths of its parameters.
      equation: for such a matmul, the equation of its einsum.
      lookup: whether such a matmul looks up rows, as in `one_hot(ids) @ table`.
      obstacle: why the layer cannot run in FP8. "" if it can.
    """

    path: str
    type: type
    shape: tuple[int, ...] = ()
    batch: int = 1
    calls: int = 1
    repeated: bool = False
    counted: bool = True
    parameters: tuple[str, ...] = ()
    equation: str = ""
    lookup: bool = False
    obstacle: str = ""

    @property
    def can_be_fp8(self) -> bool:
        """Whether the matmul of the layer can run in FP8."""
        return not self.obstacle

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths by which rules know the layer."""
        return tuple(dict.fromkeys((self.path, *self.parameters)))

    @property
    def names(self) -> tuple[str, ...]:
        """The last part of the path. Of parameters also that of their module."""
        if not self.parameters:
            return (self.path.rsplit("/", 1)[-1],)
        return tuple(part for path in self.parameters for part in path.split("/")[-2:])

    @property
    def flops(self) -> int:
        """Operations of the layer in one forward pass, 2 B M K N for each call."""
        return 2 * self.batch * math.prod(self.shape) * self.calls if self.shape else 0


def own_matmul(layer: Any, attributes: Iterable[str], default: Any) -> str:
    """The obstacle of a layer to which a user gave a matmul. "" if it has none.

    `attributes` are where flax keeps such a matmul. `default` is what flax multiplies with, and
    what it may name there itself.
    """
    for name in attributes:
        given = getattr(layer, name, None)
        if given is not None and given is not default:
            called = getattr(given, "__name__", type(given).__name__)
            return f"has a matmul of its own, {name}={called}"
    return ""


# `Rule`: which layers get which recipe.

Matcher: TypeAlias = str | type | Callable[[str, tuple[int, ...]], bool]


@dataclasses.dataclass(frozen=True, init=False)
class Rule:
    """The recipe of the layers that a matcher selects.

    A pair `(match, recipe)` in the argument `rules=` of `fp8.convert` is the same.

    Attributes:
      match: a regular expression that the whole path of a layer must match ("decoder/.*/mlp/.*").
        Or a class, for its instances. Or a function `match(path, shape) -> bool`, where shape is
        (M, K, N). A matmul of the model's own code has the path of its parameter. If several
        parameters make its weight, one of them must match. Its class is that of the module that
        holds the parameter.
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
          **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`, `state_channel`,
            `save_original`: see `fp8.dot_general`.
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
            # "+" joins the parameters of a row, and is special in a regular expression.
            return self.match in layer.paths or any(
                re.fullmatch(self.match, path) for path in layer.paths
            )
        if isinstance(self.match, type):
            return issubclass(layer.type, self.match)
        if not layer.shape:
            return False  # an embedding, for instance. A function may rely on (M, K, N)
        every = [self.match(path, layer.shape) for path in layer.paths]
        for found in every:
            if not isinstance(found, bool):
                raise TypeError(
                    f"rule {self.called} returned {found!r} for layer {layer.path!r}, but a bool "
                    "is needed."
                )
        return any(every)

    @property
    def called(self) -> str:
        """How messages and the coverage table name the rule."""
        if isinstance(self.match, str):
            return repr(self.match)
        return getattr(self.match, "__qualname__", repr(self.match))


# `Seen`: what a model is made of.


@dataclasses.dataclass(eq=False)
class Seen:
    """The modules and layers of a model, in the order in which they were seen.

    Attributes:
      modules: the type of each module, by path.
      layers: the layers, by path.
      vocabularies: the numbers of rows of its embeddings.
      flops: operations by path of a layer; see `flops_of`.
      in_loops: paths of layers that a loop runs more than once.
      reads: by path, the lengths of the loops around matmuls of the model's own code.
      uses: by path, where code calls each use of a weight; see `WeightMatmul.source`.
    """

    modules: dict[str, type] = dataclasses.field(default_factory=dict)
    layers: dict[str, Layer] = dataclasses.field(default_factory=dict)
    vocabularies: set[int] = dataclasses.field(default_factory=set)
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    in_loops: frozenset[str] = frozenset()
    reads: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    uses: dict[str, tuple[tuple[str, ...], ...]] = dataclasses.field(default_factory=dict)

    def add(self, layer: Layer) -> None:
        """Note a call of a layer."""
        if known := self.layers.get(layer.path):
            # An embedding that is looked up, and then used as a head, counts as the head.
            layer = dataclasses.replace(layer if layer.shape else known, calls=known.calls + 1)
        self.layers[layer.path] = layer


# The size of a matmul, from its dimension numbers or its equation.


class Size(NamedTuple):
    """(M, K, N): tokens, features in, features out. B: axes that input and kernel share."""

    shape: tuple[int, int, int]
    batch: int = 1


def size_of_einsum(equation: str, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Size:
    """The size of the matmul of an einsum of an input and a kernel of these shapes.

    Example:
      >>> size_of_einsum("btd,dhk->bthk", (2, 3, 8), (8, 4, 5))
      Size(shape=(6, 8, 20), batch=1)
    """
    parsed = parse_equation(equation.replace(" ", ""), lhs, rhs)
    sizes = dict(zip(parsed.lhs + parsed.rhs, (*lhs, *rhs), strict=True))
    x, w = set(parsed.lhs_kept), set(parsed.rhs_kept)
    batch = x & w & set(parsed.output)
    k = (x & w) - batch
    m, n = x - k - batch, w - k - batch
    sides = [math.prod(sizes[name] for name in names) for names in (m, k, n, batch)]
    return Size((sides[0], sides[1], sides[2]), sides[3])
