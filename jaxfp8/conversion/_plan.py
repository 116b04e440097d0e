"""`Plan`: the decision for each layer, as a pure function of what a rule sees.

`stacks_of` finds the stacks of blocks of a model.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from jaxfp8._typing import FP8StateError
from jaxfp8.conversion._foreign import Foreign
from jaxfp8.conversion._rule import Layer, Rule
from jaxfp8.plan._kernels import Kernels
from jaxfp8.plan._roofline import roofline
from jaxfp8.recipes._recipe import Recipe

# The stacks of blocks of a model, found by their numbered names.

_NUMBERED = re.compile(r"(.*?)[_./]?(\d+)")


def stacks_of(modules: Iterable[str], layers: Iterable[str]) -> list[list[str]]:
    """The stacks of blocks: lists of paths, from the first block to the last.

    A stack is two or more modules of one parent, whose names differ in a number: `block_0`,
    `block_1`, or `layers/0`, `layers/1`. Each contains layers of its own. Their types may differ. A
    stack inside a block is none.
    """
    parents = {
        "/".join(path.split("/")[:depth])
        for path in layers
        for depth in range(1, path.count("/") + 1)
    }
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for path in modules:
        parent, _, name = path.rpartition("/")
        if path in parents and (found := _NUMBERED.fullmatch(name)):
            groups.setdefault((parent, found[1]), {})[int(found[2])] = path
    stacks = [[group[i] for i in sorted(group)] for group in groups.values() if len(group) > 1]
    blocks = {block for stack in stacks for block in stack}
    return [stack for stack in stacks if not any(_is_inside(stack[0], block) for block in blocks)]


def modules_of(parameters: Iterable[str]) -> set[str]:
    """The paths of all modules around parameters of these paths."""
    parts = (path.split("/") for path in parameters)
    return {"/".join(each[:end]) for each in parts for end in range(1, len(each))}


def _is_inside(path: str, block: str) -> bool:
    return path.startswith(f"{block}/")


# The plan, and which layers stay in high precision.

ANY_USE = "?"
"""After "#", in the path of a row: one of several uses of a weight, and nothing tells which."""

Kept: TypeAlias = Literal["router", "lm_head", "lookup", "adapter", "slow"]
"""Kinds of layers that stay in high precision unless a rule names them."""

KEPT: tuple[Kept, ...] = get_args(Kept)

# A few experts are chosen by small differences of the router's logits. DeepSeek-V3 (arXiv
# 2412.19437, section 3.3) keeps gating in high precision, Megatron-Core and torchtitan do so, too.
_ROUTER = re.compile(r"(?i).*router.*")
# "gate" names routers (Mixtral, DeepSeek) and also the gate of a gated MLP. A router is narrow.
_GATE = re.compile(r"(?i)gate|switch|w?gate_logits|.*gating.*")
_NARROW = 8
# Adapters of low rank beside frozen weights. Their matmuls are a small part of a step, and they are
# all that is trained. flax names them `lora_a`, qwix `kernel_lora_a`.
_ADAPTER = re.compile(r"(?i)lora|(.*_)?lora_?(a|b|down|up)")
# DeepSeek-V3 keeps the output head in high precision. torchao's and torchtitan's examples filter
# "output", TransformerEngine's examples leave it out.
_LM_HEAD = re.compile(
    r"(?i)lm_?head|(output_?)?logits?(_?(dense|layer|proj|head))?|logitdense|unembed(ding)?"
)
# Layers of blocks have these names, too.
_OUTER_HEAD = re.compile(
    r"(?i)(out(put)?_?)?head|output(_?(layer|proj|dense|embedding))?|readout|classifier"
)


class Decision(NamedTuple):
    """What becomes of a layer.

    Attributes:
      recipe: the recipe of its matmul. None: the layer stays as it is.
      reason: why, in a few words, for the coverage table.
      options: the options of its matmul, as pairs.
    """

    recipe: Recipe | None
    reason: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How to convert a model. Hashable, so equal plans make equal models.

    Attributes:
      recipe: the recipe of all layers that nothing else decides.
      rules: the rules of the user. They come first.
      keep: kinds of layers that stay in high precision.
      kept_blocks: paths of blocks that stay in high precision.
      blocks: paths of all blocks. What is in a block is no head of the model.
      vocabulary: the number of rows of the model's largest embedding, if it has one.
      foreign: classes of layers that are not flax's, and how to compute them.
      options: the options of all matmuls, as sorted pairs. A rule may replace them.
      decided: the decisions for the layers of the example call, as pairs (path, decision). They do
        not change if a later call has other shapes.
      states_in_params: whether states are in "params" while a linen model runs.
      reads: pairs (path, loops) of the matmuls of the model's own code that run in FP8. A model
        without any runs without being traced anew.
      types: the classes of modules that hold parameters of such matmuls, as pairs (path, class).
      uses: pairs of the path of a weight, and where code uses it; see `WeightMatmul.source`.
    """

    recipe: Recipe
    rules: tuple[Rule, ...] = ()
    keep: tuple[Kept, ...] = KEPT
    kept_blocks: frozenset[str] = frozenset()
    blocks: frozenset[str] = frozenset()
    vocabulary: int | None = None
    foreign: Foreign = ()
    options: tuple[tuple[str, Any], ...] = ()
    decided: tuple[tuple[str, Decision], ...] = ()
    states_in_params: bool = False
    reads: tuple[tuple[str, tuple[int, ...]], ...] = ()
    types: tuple[tuple[str, type], ...] = ()
    uses: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = ()

    def __hash__(self) -> int:
        return self._hash  # JAX asks for it at each lookup in a cache

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @functools.cached_property
    def _by_path(self) -> dict[str, Decision]:
        return dict(self.decided)

    def decide(self, layer: Layer) -> Decision:
        """The decision for a layer. It depends on nothing but the layer and the plan."""
        if layer.obstacle:
            return Decision(None, layer.obstacle)
        if layer.path in self._by_path:
            return self._by_path[layer.path]
        for rule in self.rules:
            if rule.matches(layer):
                if rule.recipe is None or rule.recipe.is_identity:
                    return Decision(None, f"rule {rule.called}")
                options = dict(self.options) | dict(rule.options)
                return Decision(rule.recipe, f"rule {rule.called}", tuple(sorted(options.items())))
        if kept := self._kept(layer):
            return Decision(None, f"kept: {kept}")
        return Decision(self.recipe, "", self.options)

    def decide_read(self, layer: Layer, tables: Collection[int]) -> Decision:
        """The decision for a matmul of the model's own code, when a call runs."""
        del tables  # `convert` has seen them
        base, _, use = layer.path.partition("#")
        if use != ANY_USE:
            return self.decide(layer)
        known = dict(self.uses)[base]
        paths = [base if i == 0 else f"{base}#{i + 1}" for i in range(len(known))]
        decisions = [self._by_path[path] for path in paths]
        recipes = {decision.recipe for decision in decisions}
        if len(recipes) > 1 or any(recipe and recipe.rows for recipe in recipes):
            raise FP8StateError(
                f"{base}: the call with inputs= of fp8.convert multiplied by this weight "
                f"{len(known)} times. This call does it another number of times, so nothing tells "
                "which state and which recipe belong to which matmul. Convert the model with "
                "inputs= of this kind, or take a recipe without state for all of them."
            )
        return decisions[0]

    def _kept(self, layer: Layer) -> str:
        block = next((b for b in self.kept_blocks if _holds(b, layer)), None)
        if block is not None:
            return f"block {block}"
        if "router" in self.keep and _is_router(layer):
            return "router"
        if "lookup" in self.keep and layer.lookup:
            return "lookup"
        if "adapter" in self.keep and _is_adapter(layer):
            return "adapter"
        if "lm_head" in self.keep and self._is_head(layer):
            return "lm_head"
        return self._slow(layer) if "slow" in self.keep else ""

    def _is_head(self, layer: Layer) -> bool:
        if any(map(_LM_HEAD.fullmatch, layer.names)):
            return True
        if layer.repeated or any(_holds(block, layer) for block in self.blocks):
            return False
        return any(map(_OUTER_HEAD.fullmatch, layer.names)) or layer.shape[2] == self.vocabulary

    def _slow(self, layer: Layer) -> str:
        """The reason, if FP8 is estimated to be slower than bfloat16 on the chip of the kernels."""
        kernels: Kernels | None = dict(self.options).get("kernels")
        if kernels is None or kernels.chip is None or layer.batch != 1 or not layer.counted:
            return ""  # nothing to estimate for
        m, k, n = layer.shape
        speedup = roofline((m, k, n), recipe=self.recipe, kernels=kernels).speedup
        return "" if speedup >= 1 else f"slow: estimated {speedup:.2f}x on {kernels.chip}"


def _is_router(layer: Layer) -> bool:
    narrow = layer.shape[2] * _NARROW <= layer.shape[1]
    if layer.parameters:  # the name of the parameter comes last
        parts = [part for path in layer.parameters for part in path.split("/")[-3:]]
    else:
        parts = layer.path.split("/")[-2:]
    return any(map(_ROUTER.fullmatch, parts)) or (narrow and any(map(_GATE.fullmatch, layer.names)))


def _is_adapter(layer: Layer) -> bool:
    """Whether parameters of adapters alone make the weight. A sum with a frozen weight is none."""
    paths = layer.parameters or (layer.path,)
    return all(any(map(_ADAPTER.fullmatch, path.split("/")[-2:])) for path in paths)


def _holds(block: str, layer: Layer) -> bool:
    return any(_is_inside(path, block) for path in layer.paths)
