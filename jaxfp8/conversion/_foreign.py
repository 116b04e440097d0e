"""What is not a layer of flax: layers that `layers=` names, and parameters that code multiplies."""

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import jax

from jaxfp8._typing import Array
from jaxfp8.conversion._rule import CONVOLUTION, LOOKUP, TIED, UNKNOWN, Layer
from jaxfp8.jaxprs._data_flow import labels_of, reads_into, union_of_labels
from jaxfp8.jaxprs._flops import CONVOLUTIONS, MATMULS, flops_of, is_in_layer

# Layers that are not flax's: what `layers=` of `fp8.convert` says of them.

Compute: TypeAlias = Callable[..., Array]
"""`compute(layer, einsum, *args, **kwargs)`: what the layer computes, with another `einsum`."""

Foreign: TypeAlias = tuple[tuple[type, Compute], ...]


def compute_of(foreign: Foreign, kind: type) -> Compute | None:
    """The function for a class or one of its bases, if any."""
    return next((compute for base, compute in foreign if issubclass(kind, base)), None)


class OneCallEinsum:
    """An einsum that may be called once: a layer has one quantizer state."""

    def __init__(self, einsum: Callable[..., Array]) -> None:
        self._einsum, self._called = einsum, False

    def __call__(self, equation: str, x: Any, w: Any, **options: Any) -> Array:
        if self._called:
            raise ValueError(
                f"a function of layers= calls einsum twice in one call, {equation!r} again. A "
                "layer has one quantizer state. Split the layer, or write its matmuls as modules."
            )
        self._called = True
        return self._einsum(equation, x, w, **options)


# Which parameters the code of a model multiplies outside of its layers.

# The label of what is no weight: inputs, results of matmuls and layers, what they are mixed with. A
# parameter stays a weight while it is cast, cut, reshaped or combined with other parameters, with
# other variables of the model, or with constants: masks and keys of random numbers. What the
# program makes of nothing has no label. Such is the matrix that resizes a table of positions, so a
# table stays a weight there, and nothing is multiplied by it.
_ACTIVATION = 0b1


@dataclasses.dataclass(frozen=True)
class Uses:
    """How a program uses its parameters, which are named by numbers.

    Attributes:
      multiplied: the parameters that a matmul outside of layers reads as weights.
      convolved: those that a convolution outside of layers reads as its kernel.
      order: the parameters in the order in which the program uses them first.
    """

    multiplied: frozenset[int]
    convolved: frozenset[int]
    order: tuple[int, ...]


def uses_of(jaxpr: Any, numbers: Sequence[int | None]) -> Uses:
    """How a program uses its parameters.

    `numbers` has the number of each input, None for an input that is no variable of the model.
    """
    multiplied = convolved = used = 0
    order: list[int] = []

    def rule(eqn: Any, labels: list[int], last: bool) -> list[int] | None:
        nonlocal multiplied, convolved, used
        read = None
        if eqn is None or _hides_a_matmul(eqn):
            read = union_of_labels(_weights(labels))
            multiplied |= read if last else 0
        elif is_in_layer(eqn):
            read = union_of_labels(labels)
        elif eqn.primitive.name in MATMULS and all(labels[:2]):
            read = union_of_labels(_weights(labels[:2]))
            multiplied |= read if last else 0
        elif eqn.primitive.name in CONVOLUTIONS:
            read = union_of_labels(_weights(labels[1:2]))
            convolved |= read if last else 0
        elif reads_into(eqn):
            return None
        mixed = union_of_labels(labels) & _ACTIVATION
        now = union_of_labels(labels) if mixed or read is not None else 0
        if last and (new := now & ~used):
            order.extend(_numbers(new))
            used |= new
        return None if read is None or eqn is None else [_ACTIVATION] * len(eqn.outvars)

    labels = [_ACTIVATION if n is None else 0b10 << n for n in numbers]
    # A constant has a label, because it may be the data of a model that takes none.
    constant = 0b10 << len(numbers)
    inputs, constants = [*jaxpr.constvars, *jaxpr.invars], [constant] * len(jaxpr.constvars)
    program = types.SimpleNamespace(invars=inputs, eqns=jaxpr.eqns, outvars=jaxpr.outvars)
    labels_of(program, [*constants, *labels], rule)
    read, kernels = (frozenset(_numbers(x & (constant - 1))) for x in (multiplied, convolved))
    return Uses(read, kernels, tuple(number for number in order if number < len(numbers)))


def drop_layers_without_matmul(
    layers: Mapping[str, Layer], own: Mapping[str, AbstractSet[int]], uses: Uses
) -> dict[str, Layer]:
    """The layers by path, without modules that have parameters and multiply nothing by them.

    `own` has the numbers of the parameters of a layer. A layer without them stays as it is.
    """
    found = {}
    for path, layer in layers.items():
        numbers: AbstractSet[int] = own.get(path, frozenset())
        if layer.obstacle == LOOKUP and numbers & uses.multiplied:
            layer = dataclasses.replace(layer, obstacle=TIED)
        elif layer.obstacle == UNKNOWN and numbers and not numbers & uses.multiplied:
            if not numbers & uses.convolved:
                continue
            layer = dataclasses.replace(layer, obstacle=CONVOLUTION)
        found[path] = layer
    return found


def _weights(labels: Iterable[int]) -> list[int]:
    return [each for each in labels if not each & _ACTIVATION]


def _numbers(labels: int) -> list[int]:
    return [i for i, bit in enumerate(reversed(f"{labels >> 1:b}")) if bit == "1"]


def _hides_a_matmul(eqn: Any) -> bool:
    """Whether a matmul is in a program that `labels_of` does not read, as in a kernel of Pallas."""
    if reads_into(eqn):
        return False
    inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(eqn.params.values()))]
    return any(flops_of(program)[0] for program in inner if hasattr(program, "eqns"))
