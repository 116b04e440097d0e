"""Which matmuls of a traced program multiply by a weight.

A weight depends on at least one parameter, and otherwise on constants only. A matmul of a weight
and of anything that depends on something else multiplies by that weight. So casts, transposes,
slices, factors and products of several parameters make weights. A parameter that an input chooses
makes none. It is decided by what arrays depend on, through all that the program calls.

Parameters have numbers. The label of parameter n is bit n + 2 of `_data_flow.py`.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jaxfp8.jaxprs._data_flow import EACH, Place, labels_of, reads_into, union_of_labels
from jaxfp8.jaxprs._flops import CONVOLUTIONS, MATMULS, flops_of, is_in_layer

# Why a matmul of a weight stays as it is.

OWN_DERIVATIVE = "in a function with derivatives of its own, which stays as it is"
OPAQUE = "in a kernel, a callback or code with references, which stays as it is"
CONVOLUTION = "a convolution, which has no FP8 kernel"
NOTHING_SUMMED = "multiplies element by element, without a sum"
NO_ROWS = "a ragged matmul whose rows have no groups of their own"
NOT_FLOAT = "not of a float dtype of 16 bits or more"

_INPUT, _CHOICE = 0b01, 0b10  # what depends on inputs, and what is a `one_hot` of them
_FIRST = 2


@dataclasses.dataclass(frozen=True, eq=False)
class WeightMatmul:
    """A matmul that multiplies by a weight.

    Attributes:
      place: where it is in the program.
      eqn: its equation, of `dot_general` or `ragged_dot_general`.
      side: which operand is the weight, 0 or 1.
      parameters: the numbers of the parameters that the weight is made of.
      loops: the lengths of the scans around it, the outermost first.
      lookup: whether the other operand is a `one_hot`, so that rows of the weight are looked up.
      obstacle: why it stays as it is. "" if it can run in FP8.
      time: its position in the order of the program, among first uses of parameters.
      source: where code calls it, from the outermost call that holds it. It is the same in all
        traces of the code, but for code that runs twice.
    """

    place: Place
    eqn: Any
    side: int
    parameters: tuple[int, ...]
    loops: tuple[int, ...]
    lookup: bool
    obstacle: str
    time: int
    source: tuple[str, ...] = ()

    @property
    def dimension_numbers(self) -> Any:
        """Dimension numbers of the matmul with the weight on the right."""
        params = self.eqn.params
        if "ragged_dot_dimension_numbers" in params:
            return params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        contracted, batch = params["dimension_numbers"]
        order = slice(None, None, -1 if self.side == 0 else 1)
        return tuple(contracted)[order], tuple(batch)[order]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the other operand and of the weight."""
        w, x = (self.eqn.invars[i].aval.shape for i in (self.side, 1 - self.side))
        return x, w

    @property
    def size(self) -> tuple[tuple[int, int, int], int]:
        """(M, K, N), and B, the product of the axes that both operands share."""
        (x, w), ((k, _), (batch, w_batch)) = self.shapes, self.dimension_numbers
        if "ragged_dot_dimension_numbers" in self.eqn.params:
            return (x[0], x[1], w[2]), 1
        shared, inner = (math.prod(x[axis] for axis in axes) for axes in (batch, k))
        outer = math.prod(w) // max(math.prod(w[axis] for axis in w_batch) * inner, 1)
        return (math.prod(x) // max(shared * inner, 1), inner, outer), shared

    @property
    def flops(self) -> int:
        """Operations of one pass, in all loops."""
        (m, k, n), batch = self.size
        return 2 * batch * m * k * n * math.prod(self.loops)

    @property
    def equation(self) -> str:
        """The matmul as an equation of an einsum, the weight last."""
        (x, w), ((k, w_k), (batch, w_batch)) = self.shapes, self.dimension_numbers
        if "ragged_dot_dimension_numbers" in self.eqn.params:
            return "ragged td,edf->tf"
        letters = iter("abcdefghijklmnopqrstuvwxyz" * 4)
        of_x = [next(letters) for _ in x]
        shared = dict(zip((*w_k, *w_batch), (*k, *batch), strict=True))
        of_w = [of_x[shared[axis]] if axis in shared else next(letters) for axis in range(len(w))]
        out = [of_x[axis] for axis in batch]
        out += [of_x[axis] for axis in range(len(x)) if axis not in (*k, *batch)]
        out += [of_w[axis] for axis in range(len(w)) if axis not in shared]
        return f"{''.join(of_x)},{''.join(of_w)}->{''.join(out)}"


@dataclasses.dataclass(frozen=True)
class Weights:
    """How a program uses its parameters.

    Attributes:
      matmuls: the matmuls that multiply by a weight, outside of layers, in order.
      hidden: pairs (parameter, reason) of weights that a convolution takes, or code that cannot be
        read.
      times: when a parameter is first used together with an input, by its number; see
        `WeightMatmul.time`.
      tables: the numbers of rows of weights in which inputs look up rows.
    """

    matmuls: tuple[WeightMatmul, ...]
    hidden: tuple[tuple[int, str], ...]
    times: dict[int, int]
    tables: frozenset[int]


def weights_of(program: Any, numbers: Sequence[int | None]) -> Weights:
    """How a program uses its parameters.

    `numbers` has the number of each input, None for an input that is no parameter.
    """
    reader = _Reader()
    labels = [_INPUT if n is None else 1 << (n + _FIRST) for n in numbers]
    reader.loops[()] = ()
    labels_of(program, labels, reader.rule)
    return Weights(
        tuple(reader.with_sources()), tuple(dict.fromkeys(reader.hidden)), reader.times,
        frozenset(reader.tables),
    )  # fmt: skip


class _Reader:
    """The notes of `weights_of`, and its rule."""

    def __init__(self) -> None:
        self.matmuls: list[WeightMatmul] = []
        self.hidden: list[tuple[int, str]] = []
        self.times: dict[int, int] = {}
        self.tables: set[int] = set()
        self.loops: dict[Place, tuple[int, ...]] = {}
        self.outer: dict[Place, Any] = {}

    def rule(self, eqn: Any, labels: list[int], place: Place | None) -> list[int] | None:
        """The labels of the results of an equation; see `_data_flow.Rule`."""
        union = union_of_labels(labels) & ~_CHOICE
        name = "" if eqn is None else eqn.primitive.name
        if eqn is not None and place is not None and reads_into(eqn):
            length = (eqn.params["length"],) if name == "scan" else ()
            self.loops[place] = self._loops_at(place) + length
            self.outer[place] = eqn
        if eqn is not None and is_in_layer(eqn):
            self._use(union, place)
            return [_INPUT] * len(eqn.outvars)
        if eqn is None or _stays(eqn):
            return self._hides(eqn, labels, union, place)
        if name == "remat2" and eqn.params["differentiated"]:
            return labels_of(eqn.params["jaxpr"], labels, self.rule, None)  # a replay adds none
        if reads_into(eqn) or name in EACH:
            return None
        weights = [each for each in labels if each & ~_CHOICE and not each & _INPUT]
        if name in MATMULS and labels[0] and labels[1]:
            self._see(eqn, labels, place)
        elif name in CONVOLUTIONS and len(weights) < len(labels):
            self._hide(union_of_labels(weights), CONVOLUTION, place)
        elif name == "gather" and _is_weight(labels[0]) and labels[1] & _INPUT:
            self._look_up(eqn)
        if union & _INPUT:
            self._use(union, place)
            union = _INPUT
        if _keeps_choice(eqn, labels):
            union |= _CHOICE
        return [union] * len(eqn.outvars)

    def with_sources(self) -> Iterator[WeightMatmul]:
        """The matmuls, with where code calls them."""
        held = Counter(m.place[:end] for m in self.matmuls for end in range(1, len(m.place), 2))
        for matmul in self.matmuls:
            source = []
            for end in range(1, len(matmul.place) + 1, 2):
                place = matmul.place[:end]
                eqn = self.outer.get(place, matmul.eqn)
                source.append(source_info_util.summarize(eqn.source_info))
                # JAX keeps the programs of its own functions (`jnp.dot`) with their first caller.
                if held[place] == 1 and eqn.primitive.name == "jit":
                    break
            yield dataclasses.replace(matmul, source=tuple(source))

    def _loops_at(self, place: Place) -> tuple[int, ...]:
        return self.loops[place[:-2]]

    def _use(self, labels: int, place: Place | None) -> None:
        if place is not None:
            for number in _parameters(labels):
                self.times.setdefault(number, len(self.times) + len(self.matmuls))

    def _see(self, eqn: Any, labels: list[int], place: Place | None) -> None:
        sides = [_is_weight(each) for each in labels[:2]]
        if place is None or sides[0] == sides[1]:
            return  # activations, or a product of weights
        side = sides.index(True)
        matmul = WeightMatmul(
            place, eqn, side, tuple(_parameters(labels[side])), self._loops_at(place),
            lookup=bool(labels[1 - side] & _CHOICE), obstacle=_obstacle(eqn, side),
            time=len(self.times) + len(self.matmuls),
        )  # fmt: skip
        self.matmuls.append(matmul)
        if matmul.lookup:
            self.tables.add(matmul.size[0][1])

    def _hides(self, eqn: Any, labels: list[int], union: int, place: Place | None) -> list[int]:
        """Note the weights of code that cannot be read, and that may multiply by them."""
        given = [each for each in labels if _is_weight(each)]
        own = eqn is not None and eqn.primitive.name.startswith("custom_")
        self._hide(union_of_labels(given), OWN_DERIVATIVE if own else OPAQUE, place)
        self._use(union, place)
        return [_INPUT] * (0 if eqn is None else len(eqn.outvars))

    def _hide(self, labels: int, reason: str, place: Place | None) -> None:
        if place is not None:
            self.hidden += [(number, reason) for number in _parameters(labels)]
            self._use(labels, place)

    def _look_up(self, eqn: Any) -> None:
        axes = eqn.params["dimension_numbers"].start_index_map
        if len(axes) == 1:
            self.tables.add(eqn.invars[0].aval.shape[axes[0]])


def _is_weight(label: int) -> bool:
    return label >= 1 << _FIRST and not label & _INPUT


def _parameters(labels: int) -> Iterable[int]:
    bits = f"{labels >> _FIRST:b}"
    return (i for i, bit in enumerate(reversed(bits)) if bit == "1")


def _stays(eqn: Any) -> bool:
    """Whether an equation has a matmul inside that must not be replaced."""
    if reads_into(eqn) and not eqn.primitive.name.startswith("custom_"):
        return False
    inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(eqn.params.values()))]
    if "callback" in eqn.primitive.name and eqn.outvars:
        return True
    return any(flops_of(program)[0] for program in inner if hasattr(program, "eqns"))


def _obstacle(eqn: Any, side: int) -> str:
    """Why a matmul cannot run in FP8."""
    if any(
        not jnp.issubdtype(x.aval.dtype, jnp.floating) or x.aval.dtype.itemsize < 2
        for x in eqn.invars[:2]
    ):
        return NOT_FLOAT
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    if ragged is not None:
        usual = ((((1,), (1,)), ((), ())), (0,), (0,))
        given = (
            tuple(tuple(map(tuple, pair)) for pair in ragged.dot_dimension_numbers),
            tuple(ragged.lhs_ragged_dimensions),
            tuple(ragged.rhs_group_dimensions),
        )
        known = given == usual and eqn.params["group_offset"] is None and side == 1
        return "" if known else NO_ROWS
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return "" if contracted else NOTHING_SUMMED


_SAME_VALUES = {
    "convert_element_type", "reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims",
    "sharding_constraint", "copy",
}  # fmt: skip


def _keeps_choice(eqn: Any, labels: list[int]) -> bool:
    """Whether the result of an equation is a `one_hot`, which compares indices and an `iota`."""
    if eqn.primitive.name in _SAME_VALUES:
        return bool(labels[0] & _CHOICE)
    return (
        eqn.primitive.name == "eq"
        and sorted(labels) == [0, _INPUT]
        and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.integer)
    )
