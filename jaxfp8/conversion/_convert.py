"""`convert`: a whole model in FP8."""

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import flax.linen as nn
import jax
from flax import nnx

from jaxfp8._call import Example, check_options
from jaxfp8._check import check_int, check_type
from jaxfp8.conversion import _function, _linen, _nnx
from jaxfp8.conversion._coverage import Coverage, CoverageRow
from jaxfp8.conversion._foreign import Compute, Foreign
from jaxfp8.conversion._plan import KEPT, Decision, Kept, Plan, stacks_of
from jaxfp8.conversion._rule import (
    UNCALLED,
    UNSEEN,
    Layer,
    Matcher,
    Rule,
    Seen,
)
from jaxfp8.jaxprs._flops import OTHER
from jaxfp8.jaxprs._weights import OPAQUE, OWN_DERIVATIVE
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe

M = TypeVar("M")


def convert(
    model: M,
    recipe: Recipe,
    *,
    inputs: tuple[Any, ...] | None = None,
    arguments: Mapping[str, Any] | None = None,
    rules: Iterable[Rule | tuple[Matcher, Recipe | None]] = (),
    keep: Iterable[Kept] = KEPT,
    keep_first: int = 0,
    keep_last: int = 0,
    layers: Mapping[type, Compute] = types.MappingProxyType({}),
    rngs: Any = None,
    **options: Unpack[LayerOptions],
) -> tuple[M, Coverage]:
    """The model with its matmuls in FP8, and a table of what was converted.

    The parameters of the model, their paths and their initial values do not change. So a checkpoint
    of the model loads as it is.

    The dense layers of flax are converted: in linen `Dense`, `DenseGeneral`, `Einsum` and the
    projections of attention, in nnx `Linear`, `LinearGeneral`, `Einsum` and the projections of
    attention. Each gets a quantizer state of its own. A layer that is used twice has one state, and
    a stack of layers in `nn.scan` has a stack of states.

    Matmuls that code of the model computes are found in its traced program: those of an array that
    depends on parameters and constants only, and one that depends on inputs. Each has a row with
    the path of its parameters, and a state of its own.

    Layers stay in high precision if a rule says so. They also do if no rule matches and they are
    of a kind that usually stays there: see `keep`, `keep_first` and `keep_last`. Embeddings and
    norms multiply nothing by a kernel. `nn.Embed.attend`, a head that shares its weights with the
    embedding, is an "lm_head".

    Args:
      model: an unbound `flax.linen.Module`, or an `flax.nnx.Module`. Or a function whose first
        argument is a tree of parameters.
      recipe: the recipe of the layers that no rule matches.
      inputs: positional arguments of a call of the model, a tuple. Arrays may be
        `jax.ShapeDtypeStruct`s, since nothing is computed. linen models need them, because they
        make their layers when they are called, and so do functions. For nnx models they give the
        tokens of each layer, and show what code of the model multiplies.
      arguments: keyword arguments of that call.
      rules: pairs `(match, recipe)`, or `fp8.conversion.Rule`s, which also take options. The first
        match decides. `match` is a regular expression for the whole path ("decoder/.*/mlp/.*"), a
        class of layers, or a function of (path, shape) with shape (M, K, N). A recipe of None
        leaves the layers in high precision.
      keep: kinds of layers that stay in high precision unless a rule matches them. "router": the
        router of experts. "lm_head": the output head, by its name or by the size of the
        vocabulary. "lookup": `one_hot(ids) @ table`. "adapter": adapters of low rank, by their
        names (LoRA). "slow": layers that are estimated to be slower in FP8; see
        `fp8.plan.skip_slow`. It needs `inputs`, and `kernels=` with a chip. Default: all of them.
      keep_first: the number of blocks at the start of each stack that stay in high precision.
        Blocks are modules whose names differ in a number: block_0, block_1.
      keep_last: the same at the end of each stack.
      layers: layers whose matmul cannot be read, for instance inside of a `custom_vjp`. It maps a
        class to a function `compute(layer, einsum, *args, **kwargs)`, which returns what the layer
        returns, with `einsum(equation, x, w)` for its matmul.
      rngs: for nnx, the `nnx.Rngs` from which stochastic rounding takes its keys.
      **options: `kernels`, `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `state_channel`,
        `save_original`: see `fp8.dot_general`. They are for all matmuls. The mesh of the shards may
        be set later.

    Returns:
      The converted model, and its `fp8.conversion.Coverage`. The linen model is an instance of a
      subclass with the same fields and methods. `init` also returns the quantizer state, in the
      collection `fp8.linen.COLLECTION`. The nnx model is a new object that shares all Variables
      with `model`. Neither changes `model`. Of a function: an `fp8.conversion.FP8Function`.

    Raises:
      TypeError: if `model` is neither an unbound flax module nor a function, if `inputs` of linen
        or of a function are missing, and for rules, recipes and options of another type.
      ValueError: if a rule matches no layer, if earlier rules match all of its layers, or if a
        layer cannot take its recipe. Also for blocks that do not exist, and if nothing is
        converted.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> class MLP(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         x = nn.relu(nn.Dense(64, name="up")(x))
      ...         return nn.Dense(10, name="head")(x)
      >>> x = jnp.ones((8, 32))
      >>> model, coverage = fp8.convert(MLP(), fp8.recipes.delayed(), inputs=(x,))
      >>> print(coverage)
      layer type  shape       share recipe  reason
      up    Dense (8, 32, 64)   76% delayed
      head  Dense (8, 64, 10)   24% -       kept: lm_head
      76% of the FLOPs of matmuls run in FP8: 1 of 2 layers that can
      >>> sorted(model.init(jax.random.key(0), x))
      ['_overwrite_with_gradient', 'params']

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3 (embeddings, heads, routers and norms stay in high
      precision); NVIDIA Nemotron-H, arXiv:2504.03624, section 3 (so do the first and last blocks);
      torchao, `convert_to_float8_training(module_filter_fn=)`.
    """
    check_recipe(recipe)
    check_options("fp8.convert", LayerOptions, options)
    check_kernels(options.get("kernels"))
    if isinstance(options.get("reduce_axes"), list):
        options["reduce_axes"] = tuple(options["reduce_axes"] or ())
    if hasattr(model, "fp8_plan"):
        raise ValueError(
            f"model is a {type(model).__name__} that fp8.convert made. Convert the model that it "
            "was made from, or give all rules in one call."
        )
    given = _read_rules(rules)
    plan = Plan(
        recipe=recipe,
        rules=given,
        keep=_check_keep(keep),
        foreign=_read_layers(layers),
        options=tuple(sorted(options.items())),
    )
    example = _example(inputs, arguments)
    room: Any
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise TypeError(
                f"model is a bound {type(model).__name__}. Convert the model before it is bound: "
                "fp8.convert(model.unbind()[0], ...)."
            )
        if example is None:
            raise TypeError(
                f"model is a linen {type(model).__name__}, which makes its layers when it is "
                "called. Give the arguments of a call: fp8.convert(model, recipe, inputs=(x,))."
            )
        room = _linen
    elif isinstance(model, nnx.Module):
        room = _nnx
    elif callable(model) and not hasattr(model, "module") and not _is_of_module(model):
        if example is None or not example.args:
            raise TypeError(
                f"model is the function {getattr(model, '__name__', model)!r}. Give the arguments "
                "of a call, the parameters first: fp8.convert(f, recipe, inputs=(params, x))."
            )
        room = _function
    else:
        raise TypeError(_no_model(model))
    seen: Seen = room.look(model, plan, example)
    found = [
        dataclasses.replace(layer, repeated=layer.repeated or layer.path in seen.in_loops)
        for layer in seen.layers.values()
    ]
    plan = _of_model(plan, seen, keep_first, keep_last)
    _check_used(given, found)
    decisions = {layer: plan.decide(layer) for layer in found}
    flops = dict(seen.flops)
    coverage = _coverage_of(decisions, flops, flops.pop(OTHER, 0), counted=example is not None)
    if not any(decision.recipe for decision in decisions.values()):
        raise ValueError(
            f"no layer of the {type(model).__name__} would run in FP8:\n{coverage}\n{_cure(found)}"
        )
    if not coverage.share:
        raise ValueError(
            f"inputs= call no matmul of the layers that would run in FP8:\n{coverage}\nGive "
            "inputs= that run them. If the model keeps their functions in attributes (jitted or "
            "bound methods), convert it before."
        )
    decided = {layer.path: decision for layer, decision in decisions.items()}
    plan = dataclasses.replace(
        plan,
        decided=tuple(decided.items()),
        reads=tuple((path, n) for path, n in seen.reads.items() if decided[path].recipe),
        types=tuple(seen.modules.items()) if seen.reads else (),
        uses=tuple(seen.uses.items()),
    )
    try:
        return room.converted(model, plan, example, rngs), coverage
    except ValueError as error:
        if jax.sharding.get_abstract_mesh().explicit_axes:
            error.add_note(
                "fp8.convert traced the model in an Explicit mesh, with arrays that are not split. "
                "Convert the model before jax.set_mesh(mesh)."
            )
        raise


def _is_of_module(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), nn.Module | nnx.Module)


def _no_model(model: Any) -> str:
    """What to write in place of something that is no module of flax."""
    given = f"model is of type {type(model).__name__}"
    if isinstance(inner := getattr(model, "module", None), nn.Module):
        return (
            f"{given}, which wraps the linen {type(inner).__name__}. Convert that one: "
            "model, coverage = fp8.convert(wrapper.module, recipe, inputs=...). Call it with "
            'model.apply({"params": wrapper.params}, ...).'
        )
    return (
        f"{given}, but a flax.linen or flax.nnx Module is needed, or a function of parameters and "
        "inputs. For other layers see fp8.dot_general and jaxfp8.plugs."
    )


def _cure(layers: Iterable[Layer]) -> str:
    """What to write if nothing would be converted."""
    found = list(layers)
    if any(layer.can_be_fp8 for layer in found):
        return "Write keep=() or rules= for the layers that should."
    if any(layer.obstacle == UNSEEN for layer in found):
        return "Give inputs=, which show what the code of the model multiplies."
    hidden = (OPAQUE, OWN_DERIVATIVE)
    unknown = sorted({x.type.__name__ for x in found if x.obstacle in hidden})
    if not unknown:
        return "It has no matmul of parameters that rules= could convert."
    return (
        f"Code that fp8.convert does not know multiplies the parameters of {', '.join(unknown)}. "
        "Say what such a class computes, with the einsum that you are given: "
        f"layers={{{unknown[0]}: lambda layer, einsum, x: einsum(equation, x, weight)}}."
    )


def _example(inputs: Any, arguments: Any) -> Example | None:
    if inputs is arguments is None:
        return None
    if not isinstance(inputs, tuple | None):
        raise TypeError(
            f"inputs is of type {type(inputs).__name__}, but the tuple of the positional arguments "
            "of a call is needed. Write inputs=(x,)."
        )
    return Example(inputs or (), dict(arguments or {}))


def _of_model(plan: Plan, seen: Seen, keep_first: int, keep_last: int) -> Plan:
    """The plan, with what it must know of the whole model."""
    stacks = stacks_of(seen.modules, seen.layers)
    return dataclasses.replace(
        plan,
        kept_blocks=_ends_of(stacks, keep_first, keep_last),
        blocks=frozenset(block for stack in stacks for block in stack),
        # Positions and types of tokens have smaller tables.
        vocabulary=max(seen.vocabularies, default=None),
    )


def _coverage_of(
    decisions: Mapping[Layer, Decision],
    flops: Mapping[str, int],
    other_flops: int,
    *,
    counted: bool,
) -> Coverage:
    """The table of these layers. `flops` has the operations of each path."""
    rows = (
        CoverageRow(
            path=layer.path,
            type=layer.type.__name__,
            shape=layer.shape,
            recipe="" if decision.recipe is None else decision.recipe.name,
            reason=decision.reason or ("" if layer.calls else UNCALLED),
            flops=flops.get(layer.path, 0),
            can_be_fp8=layer.can_be_fp8 or layer.obstacle in (OPAQUE, OWN_DERIVATIVE),
            parameters=layer.parameters,
            equation=layer.equation,
        )
        for layer, decision in decisions.items()
    )
    return Coverage(rows=tuple(rows), other_flops=other_flops, counted=counted)


# The arguments of `convert`.


def _read_rules(rules: Iterable[Rule | tuple[Matcher, Recipe | None]]) -> tuple[Rule, ...]:
    """The rules, with pairs as rules."""
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


def _check_used(rules: Sequence[Rule], layers: Sequence[Layer]) -> None:
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


def _check_keep(keep: Iterable[Kept]) -> tuple[Kept, ...]:
    """The kinds of layers to keep. ValueError for an unknown one."""
    kinds: tuple[Kept, ...] = tuple(keep)
    if isinstance(keep, str) or any(kind not in KEPT for kind in kinds):
        raise ValueError(
            f"keep={keep!r} must be a sequence of {', '.join(map(repr, KEPT))}. Write keep=() to "
            "convert all of them."
        )
    return kinds


def _ends_of(stacks: list[list[str]], first: int, last: int) -> frozenset[str]:
    """The blocks that `keep_first=` and `keep_last=` leave in high precision.

    ValueError if a number is negative, if the model has no stack, or if no block would be left.
    """
    for name, number in (("keep_first", first), ("keep_last", last)):
        check_int(name, number, "a number of blocks, an integer", least=0)
    if first == last == 0:
        return frozenset()
    if not stacks:
        raise ValueError(
            f"keep_first={first} and keep_last={last} need blocks, but the model has no numbered "
            "blocks such as block_0 and block_1. The layers of nn.scan share one path and one "
            "recipe. Name layers in rules=[(pattern, None)] instead."
        )
    for stack in stacks:
        if first + last >= len(stack):
            raise ValueError(
                f"keep_first={first} and keep_last={last} leave no block of {stack[0]!r} to "
                f"{stack[-1]!r} in FP8, which are {len(stack)}. Keep fewer."
            )
    return frozenset(
        block for stack in stacks for block in (*stack[:first], *stack[len(stack) - last :])
    )


def _read_layers(layers: Mapping[type, Compute]) -> Foreign:
    """The pairs of `layers=`. TypeError unless they are classes and functions."""
    example = "{Einsum: lambda layer, einsum, x: einsum(layer.equation, x, layer.w)}"
    check_type("layers", layers, Mapping, f"a dict of classes and functions: {example}")
    for kind, compute in layers.items():
        if not isinstance(kind, type) or not callable(compute):
            raise TypeError(
                f"layers has {kind!r}: {compute!r}. A class and a function of (layer, einsum, "
                "*arguments) are needed."
            )
    return tuple(layers.items())
