"""flax.linen's layers with a kernel, and the other modules that have one.

An interceptor runs in place of a method, inside the same module. So these functions create the
parameters that flax's method would create, under the same names.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from jaxfp8._typing import Array
from jaxfp8.conversion._plan import Decision
from jaxfp8.conversion._rule import FP8, LOOKUP, Layer, Seen, Size, size_of_einsum
from jaxfp8.jaxprs._weights import CONVOLUTION
from jaxfp8.linen._dot_general import Plug
from jaxfp8.linen._layers import apply_dense, apply_einsum
from jaxfp8.linen._matmul_module import MatmulModule, matmul_options
from jaxfp8.linen._moe import ExpertKernels, FP8GroupedLinear, FP8MoE
from jaxfp8.linen._state import NAME, matmul_state
from jaxfp8.matmul._options import KeepsFP8, LayerInput, as_array
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._einsum import einsum

# flax.linen's layers with a kernel: the shape of their matmul, and their call in FP8.


class Known(NamedTuple):
    """A method of a flax layer that multiplies by a kernel.

    Attributes:
      size: the size of its matmul, from the module and the arguments of the call.
      run: `run(module, decision, next_fun, *args)`: the call with the matmul of a decision.
        `next_fun(*args)` would be flax's own.
    """

    size: Callable[..., Size]
    run: Callable[..., Array]


def _plug(decision: Decision) -> Plug:
    assert decision.recipe is not None
    return Plug(decision.recipe, decision.options, of_layer=True)


def _dense_size(module: nn.Dense, inputs: Any) -> Size:
    *leading, k = jnp.shape(inputs)
    return Size((math.prod(leading), k, module.features))


def _run_dense(module: nn.Dense, decision: Decision, next_fun: Any, inputs: Any) -> Array:
    del next_fun
    return apply_dense(module, LayerInput.read(inputs, None), _plug(decision)())


def _tuple(axes: Any) -> tuple[int, ...]:
    return tuple(axes) if isinstance(axes, list | tuple) else (axes,)


def _general_size(module: nn.DenseGeneral, inputs: Any) -> Size:
    shape = jnp.shape(inputs)
    k = math.prod(shape[axis] for axis in _tuple(module.axis))
    batch = math.prod(shape[axis] for axis in _tuple(module.batch_dims))
    return Size((math.prod(shape) // (k * batch), k, math.prod(_tuple(module.features))), batch)


def _run_general(module: nn.DenseGeneral, decision: Decision, next_fun: Any, inputs: Any) -> Array:
    # flax looks for a matmul and a promotion in these fields. A module that runs is a copy, which
    # flax made for this call of the model, so no object of the user changes.
    before = {name: getattr(module, name) for name in ("dot_general_cls", "promote_dtype")}
    object.__setattr__(module, "dot_general_cls", _plug(decision))
    object.__setattr__(module, "promote_dtype", KeepsFP8.of(module.promote_dtype))
    try:
        y: Array = next_fun(as_array("inputs", inputs))
    finally:
        for name, field in before.items():
            object.__setattr__(module, name, field)
    return y


def _einsum_size(module: nn.Einsum, inputs: Any, einsum_str: str | None = None) -> Size:
    equation = nn.merge_param("einsum_str", module.einsum_str, einsum_str)
    return size_of_einsum(equation, jnp.shape(inputs), tuple(module.shape))


def _run_einsum(
    module: nn.Einsum,
    decision: Decision,
    next_fun: Any,
    inputs: Any,
    einsum_str: str | None = None,
) -> Array:
    del next_fun

    def multiply(*operands: Any, **options: Any) -> Array:
        return matmul_of(einsum, module, decision)(*operands, **options)

    return apply_einsum(module, LayerInput.read(inputs, None), einsum_str, multiply)


def matmul_of(
    function: Callable[..., Array], module: nn.Module, decision: Decision, name: str = NAME
) -> Callable[..., Array]:
    """`fp8.einsum` or `fp8.dot_general`, with the state of the module that has this name."""
    assert decision.recipe is not None
    options: Any = dict(decision.options)
    return functools.partial(
        function,
        recipe=decision.recipe,
        state=matmul_state(module, decision.recipe, options.get("state_channel"), name),
        **matmul_options(module, decision.recipe, options),
    )


def _attend_size(module: nn.Embed, query: Any) -> Size:
    *leading, k = jnp.shape(query)
    return Size((math.prod(leading), k, module.num_embeddings))


def _run_attend(module: nn.Embed, decision: Decision, next_fun: Any, query: Any) -> Array:
    del next_fun
    query, table = module.promote_dtype(query, module.embedding, dtype=module.dtype)
    dimension_numbers = (((query.ndim - 1,), (1,)), ((), ()))
    return matmul_of(dot_general, module, decision)(query, table, dimension_numbers)


def _raw(method: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(method, "__wrapped__", method)  # what interceptors see as orig_method.func


KNOWN: dict[Callable[..., Any], Known] = {
    _raw(nn.Dense.__call__): Known(_dense_size, _run_dense),
    _raw(nn.DenseGeneral.__call__): Known(_general_size, _run_general),
    _raw(nn.Einsum.__call__): Known(_einsum_size, _run_einsum),
    _raw(nn.Embed.attend): Known(_attend_size, _run_attend),
}
"""What is intercepted. A subclass that calls its parent's method runs that method, too."""


# The other modules with a kernel, as one traced call shows them.


def see_other_layer(seen: Seen, path: str, module: nn.Module) -> None:
    """Note a layer whose call ended, and that no known method has noted."""
    if path not in seen.layers and (obstacle := _obstacle(module)):
        seen.add(Layer(path=path, type=type(module), obstacle=obstacle))


def _obstacle(module: nn.Module) -> str:
    if isinstance(module, nn.Embed):
        return LOOKUP
    if isinstance(module, nn.Conv | nn.ConvLocal | nn.ConvTranspose):
        return CONVOLUTION
    ours = MatmulModule | FP8GroupedLinear | FP8MoE | ExpertKernels
    return FP8 if isinstance(module, ours) else ""
