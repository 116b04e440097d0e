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

Place: TypeAlias = tuple[int, ...]
"""Where an equation is: its number, or those of an equation, a program inside of it, and so on."""

Rule: TypeAlias = Callable[[Any, list[int], Place | None], list[int] | None]
"""`rule(eqn, labels, place)`: what a reader knows of an equation.

It returns the labels of the outputs, or None: then this module decides, and reads the programs
inside of the equation. `place` is None while a loop is read until the labels of its carry stay.
`eqn` is None for programs that write to references. Nobody reads their equations.
"""

_CALLS = {
    "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "jit", "remat2",
    "shard_map",
}  # fmt: skip
"""They run one program, with their inputs in its order."""
EACH = {"device_put", "optimization_barrier"}
"""Each output is the input of the same place."""


def _no_rule(eqn: Any, labels: list[int], place: Place | None) -> None:
    del eqn, labels, place


def _inside(place: Place | None, *numbers: int) -> Place | None:
    return None if place is None else (*place, *numbers)


def labels_of(
    program: Any, labels: Sequence[int], rule: Rule = _no_rule, place: Place | None = ()
) -> list[int]:
    """The labels of the outputs of a program, or of a program inside of it.

    `labels` are those of its inputs. `rule` comes before the rules of this module. `place` is that
    of the program, an even number of numbers; see `Rule`. The result of `is_finite` has no labels.
    So an optimizer that skips gradients of NaN in all parameters couples nothing.

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
        rule(None, list(labels), place)
        return [union_of_labels(labels)] * len(jaxpr.outvars)
    known = dict(zip(jaxpr.invars, labels, strict=True))

    def read(values: Any) -> list[int]:
        # A literal has no hash. A constant of the program is not in `known`.
        return [0 if isinstance(x, Literal) else known.get(x, 0) for x in values]

    for number, eqn in enumerate(jaxpr.eqns):
        inputs, here = read(eqn.invars), _inside(place, number)
        outputs = rule(eqn, inputs, here)
        if outputs is None:
            outputs = _of_equation(eqn, inputs, rule, here)
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


def _of_equation(eqn: Any, labels: list[int], rule: Rule, place: Place | None) -> list[int]:
    """The labels of the outputs of an equation, from those of its inputs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "is_finite":
        return [0]
    if name in EACH:
        return labels
    if name == "cond":
        index, *operands = labels
        branches = [
            labels_of(branch, operands, rule, _inside(place, number))
            for number, branch in enumerate(params["branches"])
        ]
        return [index | union_of_labels(each) for each in zip(*branches, strict=True)]
    if name == "scan":
        return _of_scan(eqn, labels, rule, place)
    if name == "while":
        return _of_while(params, labels, rule, place)
    if len(programs := _called(eqn)) == 1:
        return labels_of(programs[0], labels, rule, _inside(place, 0))
    return [union_of_labels(labels)] * len(eqn.outvars)


def _of_scan(eqn: Any, labels: list[int], rule: Rule, place: Place | None) -> list[int]:
    first, carried = scan_counts(eqn)
    consts, split = labels[:first], labels[first + carried :]
    carry, outs = _fixpoint(
        lambda carry, place: labels_of(
            eqn.params["jaxpr"], [*consts, *carry, *split], rule, _inside(place, 0)
        ),
        labels[first : first + carried],
        place,
    )
    return [*carry, *outs[carried:]]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan."""
    # jax 0.10 and 0.12 have other parameters, so shapes tell what is split along the first axis.
    program = eqn.params["jaxpr"]
    jaxpr = getattr(program, "jaxpr", program)
    carried = _same_shapes(jaxpr.outvars, eqn.outvars)
    return _same_shapes(jaxpr.invars, eqn.invars) - carried, carried


def _of_while(params: Any, labels: list[int], rule: Rule, place: Place | None) -> list[int]:
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]

    def once(carry: list[int], place: Place | None) -> list[int]:
        # What ends the loop decides how often each array changes.
        stops, body = params["cond_jaxpr"], params["body_jaxpr"]
        (stop,) = labels_of(stops, [*labels[:first], *carry], rule, _inside(place, 0))
        outs = labels_of(body, [*labels[first:second], *carry], rule, _inside(place, 1))
        return [stop | each for each in outs]

    return _fixpoint(once, labels[second:], place)[0]


def _fixpoint(
    once: Callable[[list[int], Place | None], list[int]], carry: list[int], place: Place | None
) -> tuple[list[int], list[int]]:
    """The labels of what a loop carries, after any number of iterations, and its outputs."""
    while True:
        outs = once(carry, None)
        after = [old | new for old, new in zip(carry, outs, strict=False)]
        if after == carry:
            return carry, outs if place is None else once(carry, place)
        carry = after


def _same_shapes(inside: Any, outside: Any) -> int:
    return sum(
        one.aval.shape == other.aval.shape for one, other in zip(inside, outside, strict=True)
    )
