"""Which matmuls of a program multiply by parameters: a count that shares no code with jaxfp8.

A value is the set of the names of the parameters that it is made of, or `OTHER` if anything else
that is given to the program takes part.
"""

import math
from typing import Any, NamedTuple

import jax

OTHER = None
Value = frozenset[str] | None
BODIES = {"jit", "pjit", "remat2", "checkpoint", "closed_call", "core_call", "shard_map"}


class Product(NamedTuple):
    """A matmul of a weight: the names of its parameters, and its operations in all loops."""

    names: frozenset[str]
    flops: int


def join(values: list[Value]) -> Value:
    known = [value for value in values if value is not None]
    return frozenset().union(*known) if len(known) == len(values) else OTHER


def walk(program: Any, values: list[Value], times: int, found: list[Product]) -> list[Value]:
    """The values that a program returns. Its matmuls of weights go to `found`."""
    program = getattr(program, "jaxpr", program)
    at: dict[Any, Value] = dict.fromkeys(program.constvars, frozenset())
    at |= dict(zip(program.invars, values, strict=True))

    def read(variables: Any) -> list[Value]:  # a literal has no hash
        return [frozenset() if hasattr(x, "val") else at[x] for x in variables]

    for eqn in program.eqns:
        at |= zip(eqn.outvars, step(eqn, read(eqn.invars), times, found), strict=True)
    return read(program.outvars)


def step(eqn: Any, given: list[Value], times: int, found: list[Product]) -> list[Value]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan" or name == "while":
        return loop(eqn, given, times, found)
    if name == "cond":
        branches = [walk(each, given[1:], times, found) for each in params["branches"]]
        return [join([given[0], *each]) for each in zip(*branches, strict=True)]
    if name in BODIES:
        return walk(params.get("jaxpr", params.get("call_jaxpr")), given, times, found)
    if name in ("dot_general", "ragged_dot_general"):
        numbers = params.get("dimension_numbers")
        numbers = numbers or params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        weights = [side for side in given[:2] if side]
        if len(weights) == 1 and OTHER in given[:2] and numbers[0][0]:
            inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in numbers[0][0])
            flops = 2 * math.prod(eqn.outvars[0].aval.shape) * inner * times
            found.append(Product(weights[0], flops))
    return [join(given)] * len(eqn.outvars)  # nobody may open kernels or custom derivatives


def loop(eqn: Any, given: list[Value], times: int, found: list[Product]) -> list[Value]:
    """A `scan`, or a `while`, whose turns nobody knows: they count as one."""
    params, variables = eqn.params, eqn.invars
    if eqn.primitive.name == "while":
        given, variables = given[params["cond_nconsts"] :], variables[params["cond_nconsts"] :]
        body = params["body_jaxpr"]
    else:
        body, times = params["jaxpr"], times * params["length"]
    body = getattr(body, "jaxpr", body)
    # Inside, what a scan splits has an axis less. Outside, what it stacks has one more.
    whole, carried = (
        sum(x.aval.shape == y.aval.shape for x, y in zip(inner, outer, strict=True))
        for inner, outer in ((body.invars, variables), (body.outvars, eqn.outvars))
    )
    consts, carry, split = given[: whole - carried], given[whole - carried : whole], given[whole:]
    while True:
        notes: list[Product] = []
        outs = walk(body, [*consts, *carry, *split], times, notes)
        grown = [join([*pair]) for pair in zip(carry, outs, strict=False)]
        if grown == carry:
            found += notes
            return outs
        carry = grown


def count(function: Any, parameters: Any, *others: Any) -> list[Product]:
    """The matmuls of weights in a call of `function(parameters, *others)`."""
    named, _ = jax.tree_util.tree_flatten_with_path(parameters)
    values: list[Value] = [frozenset({jax.tree_util.keystr(path)}) for path, _ in named]
    values += [OTHER] * len(jax.tree.leaves(others))
    found: list[Product] = []
    walk(jax.make_jaxpr(function)(parameters, *others), values, 1, found)
    return found
