"""Which inputs of a traced program each of its outputs is computed from.

An input has a set of labels. An output gets the labels of all inputs that it depends on. Arrays
are one thing: if a value of an array depends on an input, then the array does. An equation that
this module does not know passes all labels of its inputs to all of its outputs. So a missing label
is a proof, and a label is not.

A set of labels is an int: bit i is label i.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

Rule: TypeAlias = Callable[[Any, list[int], bool], list[int] | None]
"""`rule(eqn, labels, last)`: what a reader knows of an equation.

It returns the labels of the outputs, or None: then this module decides, and reads the programs
inside of the equation. `last` is False while a loop is read until the labels of its carry stay.
`eqn` is None for programs that write to references. Nobody reads their equations.
"""

_CALLS = {
    "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "jit", "remat2",
    "shard_map",
}  # fmt: skip
"""They run one program, with their inputs in its order."""
_EACH = {"device_put", "optimization_barrier"}
"""Each output is the input of the same place."""


def _no_rule(eqn: Any, labels: list[int], last: bool) -> None:
    del eqn, labels, last


def labels_of(
    program: Any, labels: Sequence[int], rule: Rule = _no_rule, last: bool = True
) -> list[int]:
    """The labels of the outputs of a program, or of a program inside of it.

    `labels` are those of its inputs. `rule` comes before the rules of this module; for `last` see
    `Rule`. The result of `is_finite` has no labels. So an optimizer that skips gradients of NaN in
    all parameters couples nothing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = lambda x, y: (jnp.sin(x), x + y, jnp.where(jnp.isfinite(x), y, 0.0))
      >>> labels_of(jax.make_jaxpr(f)(1.0, 2.0), [0b01, 0b10])
      [1, 3, 2]
    """
    # jax 0.12 has no ClosedJaxpr.
    jaxpr = getattr(program, "jaxpr", program)
    variables = [*jaxpr.invars, *(x for eqn in jaxpr.eqns for x in (*eqn.invars, *eqn.outvars))]
    if any(hasattr(x.aval, "inner_aval") for x in variables):
        # A reference: an equation writes to one of its inputs, which no output shows.
        rule(None, list(labels), last)
        return [union_of_labels(labels)] * len(jaxpr.outvars)
    known = dict(zip(jaxpr.invars, labels, strict=True))

    def read(values: Any) -> list[int]:
        # A literal has no hash. A constant of the program is not in `known`.
        return [0 if isinstance(x, Literal) else known.get(x, 0) for x in values]

    for eqn in jaxpr.eqns:
        inputs = read(eqn.invars)
        outputs = rule(eqn, inputs, last)
        if outputs is None:
            outputs = _of_equation(eqn, inputs, rule, last)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return read(jaxpr.outvars)


def union_of_labels(labels: Iterable[int]) -> int:
    """The labels of several sets."""
    return functools.reduce(operator.or_, labels, 0)


def reads_into(eqn: Any) -> bool:
    """Whether `labels_of` reads the programs inside of an equation."""
    return eqn.primitive.name in ("cond", "scan", "while") or len(_called(eqn)) == 1


def _called(eqn: Any) -> list[Any]:
    """The programs that an equation runs with its inputs in their order."""
    if eqn.primitive.name not in _CALLS:
        return []
    return [x for x in eqn.params.values() if hasattr(getattr(x, "jaxpr", x), "eqns")]


def _of_equation(eqn: Any, labels: list[int], rule: Rule, last: bool) -> list[int]:
    """The labels of the outputs of an equation, from those of its inputs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "is_finite":
        return [0]
    if name in _EACH:
        return labels
    if name == "cond":
        index, *operands = labels
        branches = [labels_of(branch, operands, rule, last) for branch in params["branches"]]
        return [index | union_of_labels(each) for each in zip(*branches, strict=True)]
    if name == "scan":
        return _of_scan(eqn, labels, rule, last)
    if name == "while":
        return _of_while(params, labels, rule, last)
    if len(programs := _called(eqn)) == 1:
        return labels_of(programs[0], labels, rule, last)
    return [union_of_labels(labels)] * len(eqn.outvars)


def _of_scan(eqn: Any, labels: list[int], rule: Rule, last: bool) -> list[int]:
    # jax 0.10 and 0.12 have other parameters, so shapes tell what is split along the first axis.
    program = eqn.params["jaxpr"]
    jaxpr = getattr(program, "jaxpr", program)
    whole = _same_shapes(jaxpr.invars, eqn.invars)
    carried = _same_shapes(jaxpr.outvars, eqn.outvars)
    consts, split = labels[: whole - carried], labels[whole:]
    carry, outs = _fixpoint(
        lambda carry, last: labels_of(program, [*consts, *carry, *split], rule, last),
        labels[whole - carried : whole],
        last,
    )
    return [*carry, *outs[carried:]]


def _of_while(params: Any, labels: list[int], rule: Rule, last: bool) -> list[int]:
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]

    def once(carry: list[int], last: bool) -> list[int]:
        # What ends the loop decides how often each array changes.
        (stop,) = labels_of(params["cond_jaxpr"], [*labels[:first], *carry], rule, last)
        outs = labels_of(params["body_jaxpr"], [*labels[first:second], *carry], rule, last)
        return [stop | each for each in outs]

    return _fixpoint(once, labels[second:], last)[0]


def _fixpoint(
    once: Callable[[list[int], bool], list[int]], carry: list[int], last: bool
) -> tuple[list[int], list[int]]:
    """The labels of what a loop carries, after any number of iterations, and its outputs."""
    while True:
        outs = once(carry, False)
        after = [old | new for old, new in zip(carry, outs, strict=False)]
        if after == carry:
            return carry, once(carry, True) if last else outs
        carry = after


def _same_shapes(inside: Any, outside: Any) -> int:
    return sum(
        one.aval.shape == other.aval.shape for one, other in zip(inside, outside, strict=True)
    )
