"""Names of layers: the path of a matmul or of its state, without the parts that say nothing."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from flax import nnx

from jaxfp8.nnx._dot_general import AbstractFP8Matmul

# The plugs of layers, as linen numbers them and as nnx names their attributes.
_PLUGS = ("FP8DotGeneral_0", "FP8EinsumOp_0", "dot_general", "einsum_op")
_TOP = "matmul"


def layer_name(path: Iterable[Any]) -> str:
    """The name of a layer from the path of its matmul.

    Example:
      >>> layer_name(("mlp", "up", "FP8DotGeneral_0"))
      'mlp/up'
    """
    parts = [str(part) for part in path]
    if parts and parts[-1] in _PLUGS:
        parts.pop()
    return "/".join(parts) or _TOP


@contextlib.contextmanager
def named_matmuls(model: Any) -> Iterator[None]:
    """Give each FP8 matmul of an nnx model its path as a name, until the context ends.

    Args:
      model: an nnx module; None for other models, which need no names.

    Raises:
      TypeError: if it is no nnx module.

    Example:
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> layer = fp8.nnx.FP8Linear(8, 4, rngs=nnx.Rngs(0))
      >>> with named_matmuls(layer):
      ...     layer.dot_general.name
      'dot_general'
    """
    if model is not None and not isinstance(model, nnx.Module):
        raise TypeError(
            f"model is of type {type(model).__name__}, but collect(model) takes an nnx module. "
            "Layers of linen know their names. Write collect()."
        )
    nodes = () if model is None else nnx.iter_graph(model)
    matmuls = [(path, node) for path, node in nodes if isinstance(node, AbstractFP8Matmul)]
    before = [matmul.name for _, matmul in matmuls]
    for path, matmul in matmuls:
        matmul.name = "/".join(map(str, path))
    try:
        yield
    finally:
        for (_, matmul), name in zip(matmuls, before, strict=True):
            matmul.name = name
