"""Runs a traced program with other code in place of some of its equations.

A program that contains such an equation is rebuilt with the function of JAX that built it: `jit`,
`checkpoint`, `scan`, `while_loop`, `switch` or `shard_map`. All else is bound as it was.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.extend.core import Literal

from jaxfp8.jaxprs._data_flow import Place, scan_counts

# A call as a program.


def is_array(leaf: Any) -> bool:
    """Whether a leaf of arguments is traced. Flags, numbers of Python and functions are not."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


class Traced:
    """A call of a function as a program of the arrays among its arguments.

    Attributes:
      leaves: the arguments, as a list of leaves.
      program: the traced program. Its inputs are the arrays, in the order of `leaves`.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.leaves, structure = jax.tree.flatten(args)

        def call(*arrays: Any) -> list[Any]:
            rest = iter(arrays)
            leaves = [next(rest) if is_array(leaf) else leaf for leaf in self.leaves]
            outs, self._structure = jax.tree.flatten(
                function(*jax.tree.unflatten(structure, leaves))
            )
            self._outs = [None if is_array(out) else (out,) for out in outs]
            return [out for out in outs if is_array(out)]

        self.arrays = [leaf for leaf in self.leaves if is_array(leaf)]
        self.program = jax.make_jaxpr(call)(*self.arrays)

    def result(self, arrays: Sequence[Any]) -> Any:
        """What the function returns, with these arrays as the results of the program."""
        rest = iter(arrays)
        outs = [next(rest) if out is None else out[0] for out in self._outs]
        return jax.tree.unflatten(self._structure, outs)


# The run of a program.

Replace: TypeAlias = Callable[[Place, Any, list[Any], Any], Any]
"""`replace(place, eqn, operands, extra)`: the result of an equation that is computed otherwise."""

Check: TypeAlias = Callable[[Any, list[Any]], None]
"""`check(eqn, operands)`: raises an error if an equation cannot be computed as it was.

`eqn` is None for the results of the call."""


def run(
    traced: Traced,
    extras: Mapping[Place, Any],
    replace: Replace,
    check: Check = lambda eqn, operands: None,
) -> Any:
    """The result of a traced call, with `replace` for the equations at some places.

    `extras` has a place for each of them, with a tree of arrays that its equation needs. Around
    an equation in scans they have leading axes, one for each scan, the outermost first. An array of
    `traced` may be a tree, if all equations that take it are replaced. `check` sees all others.
    """
    inside = frozenset(place[:end] for place in extras for end in range(1, len(place) + 1))
    run = _Run(inside, replace, check)
    results = run.program(traced.program, traced.arrays, dict(extras), ())
    check(None, results)
    return traced.result(results)


class _Run:
    """A run of a program. `inside` has the places at which, or in which, something is replaced."""

    def __init__(self, inside: frozenset[Place], replace: Replace, check: Check) -> None:
        self._inside, self._replace, self._check = inside, replace, check

    def program(
        self, program: Any, args: Sequence[Any], extras: dict[Place, Any], place: Place
    ) -> list[Any]:
        """The results of a program, or of a program inside of it."""
        jaxpr = getattr(program, "jaxpr", program)
        consts = getattr(program, "consts", ())
        known = dict(zip(jaxpr.invars, args, strict=True))
        known.update(zip(jaxpr.constvars, consts, strict=True))
        last = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in eqn.invars if _is_variable(x)}
        ends: dict[int, list[Any]] = {}
        for variable, number in last.items():
            ends.setdefault(number, []).append(variable)
        kept = {x for x in jaxpr.outvars if _is_variable(x)}

        def read(x: Any) -> Any:
            return known[x] if _is_variable(x) else x.val

        for number, eqn in enumerate(jaxpr.eqns):
            here, values = (*place, number), [read(x) for x in eqn.invars]
            with _context_of(eqn):
                if here in extras:
                    outs = [self._replace(here, eqn, values, extras[here])]
                elif here in self._inside:
                    own = {key: extra for key, extra in extras.items() if key[: len(here)] == here}
                    outs = _REBUILD[eqn.primitive.name](self, eqn, values, own, here)
                else:
                    self._check(eqn, values)
                    found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
                    outs = found if eqn.primitive.multiple_results else [found]
            known.update(zip(eqn.outvars, outs, strict=True))
            for variable in ends.get(number, ()):  # eager arrays would stay in memory
                if variable not in kept:
                    del known[variable]
        return [read(x) for x in jaxpr.outvars]


def _is_variable(x: Any) -> bool:
    return not isinstance(x, Literal)


@contextlib.contextmanager
def _context_of(eqn: Any) -> Any:
    """What was set where an equation was traced: names, a mesh, where it is computed."""
    names = str(eqn.source_info.name_stack)
    with jax.named_scope(names) if names else contextlib.nullcontext(), eqn.ctx.manager:
        yield


# Equations that run programs, rebuilt.


def _jit(run: _Run, eqn: Any, values: list[Any], extras: Any, place: Place) -> Any:
    params = eqn.params

    def call(extras: Any, *values: Any) -> list[Any]:
        values = tuple(map(_constrain, values, params["in_shardings"]))
        outs = run.program(params["jaxpr"], values, extras, (*place, 0))
        return list(map(_constrain, outs, params["out_shardings"]))

    call.__name__ = params["name"]
    return jax.jit(call, inline=params["inline"])(extras, *values)


def _constrain(x: Any, sharding: Any) -> Any:
    is_given = isinstance(sharding, jax.sharding.Sharding)
    return lax.with_sharding_constraint(x, sharding) if is_given else x


def _remat(run: _Run, eqn: Any, values: list[Any], extras: Any, place: Place) -> Any:
    params = eqn.params

    def call(extras: Any, *values: Any) -> list[Any]:
        return run.program(params["jaxpr"], values, extras, (*place, 0))

    again = jax.checkpoint(call, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return again(extras, *values)


def _call(run: _Run, eqn: Any, values: list[Any], extras: Any, place: Place) -> Any:
    return run.program(eqn.params["call_jaxpr"], values, extras, (*place, 0))


def _scan(run: _Run, eqn: Any, values: list[Any], extras: Any, place: Place) -> Any:
    params = eqn.params
    consts, carried = scan_counts(eqn)
    shared, carry, split = (
        values[:consts], values[consts : consts + carried], values[consts + carried :]
    )  # fmt: skip

    def body(carry: list[Any], each: Any) -> Any:
        extras, split = each
        outs = run.program(params["jaxpr"], [*shared, *carry, *split], extras, (*place, 0))
        return outs[:carried], outs[carried:]

    last, stacked = lax.scan(
        body, carry, (extras, split), length=params["length"], reverse=params["reverse"],
        unroll=params["unroll"],
    )  # fmt: skip
    return [*last, *stacked]


def _while(run: _Run, eqn: Any, values: list[Any], extras: Any, place: Place) -> Any:
    params = eqn.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    of_cond, of_body = ({k: v for k, v in extras.items() if k[len(place)] == i} for i in (0, 1))

    def goes_on(carry: list[Any]) -> Any:
        operands = [*values[:first], *carry]
        return run.program(params["cond_jaxpr"], operands, of_cond, (*place, 0))[0]

    def body(carry: list[Any]) -> list[Any]:
        operands = [*values[first:second], *carry]
        return run.program(params["body_jaxpr"], operands, of_body, (*place, 1))

    return lax.while_loop(goes_on, body, values[second:])


def _cond(run: _Run, eqn: Any, values: list[Any], extras: Any, place: Place) -> Any:
    def branch(number: int, program: Any) -> Callable[..., Any]:
        own = {key: extra for key, extra in extras.items() if key[len(place)] == number}
        # Each branch takes the extras of all, so that gradients of those that did not run are 0.
        return lambda extras, *operands: run.program(
            program, operands, {key: extras[key] for key in own}, (*place, number)
        )

    branches = [branch(number, program) for number, program in enumerate(eqn.params["branches"])]
    return lax.switch(values[0], branches, extras, *values[1:])


def _shard_map(run: _Run, eqn: Any, values: list[Any], extras: Any, place: Place) -> Any:
    params = eqn.params

    def call(extras: Any, *values: Any) -> tuple[Any, ...]:
        return tuple(run.program(params["jaxpr"], values, extras, (*place, 0)))

    return jax.shard_map(
        call, mesh=params["mesh"], in_specs=(jax.P(), *params["in_specs"]),
        out_specs=tuple(params["out_specs"]), check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )(extras, *values)  # fmt: skip


_REBUILD: dict[str, Callable[[_Run, Any, list[Any], Any, Place], Any]] = {
    "jit": _jit,
    "remat2": _remat,
    "closed_call": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
"""What rebuilds the primitives that `reads_into` accepts, except custom derivatives."""
