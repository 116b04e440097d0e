"""What a linen model is made of, as one traced call shows it."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from jaxfp8._typing import PyTree
from jaxfp8.conversion._layer import CONVOLUTION, FP8, LOOKUP, UNKNOWN, Layer, own_matmul
from jaxfp8.conversion._linen_layers import Known
from jaxfp8.conversion._seen import Seen
from jaxfp8.conversion._weights import known_by_use, uses_of
from jaxfp8.linen._grouped import FP8GroupedLinear
from jaxfp8.linen._matmul_module import MatmulModule
from jaxfp8.linen._moe import ExpertKernels, FP8MoE


def see_module(seen: Seen, path: str, module: nn.Module) -> None:
    """Note a module whose call begins."""
    seen.modules.setdefault(path, type(module))
    if isinstance(module, nn.Embed):
        seen.vocabularies.add(module.num_embeddings)


def see_kernel(seen: Seen, path: str, module: nn.Module) -> None:
    """Note a module whose call ended, if it has a kernel that no known method multiplied."""
    if path in seen.layers or path in seen.shared_scopes or module.scope is None:
        return
    own = module.scope.variables().get("params", {})
    kernels = frozenset(
        name
        for name, value in own.items()
        if not isinstance(value, Mapping) and len(getattr(value, "shape", ())) > 1
    )
    if kernels:
        seen.add(Layer(path=path, type=type(module), obstacle=_obstacle(module)))
        seen.kernels[path] = kernels


def see_uses(seen: Seen, program: Any, variables: PyTree) -> None:
    """Note what a program does with parameters. Its inputs begin with the variables."""
    numbers: list[int | None] = [None] * len(program.invars)
    own: defaultdict[str, set[int]] = defaultdict(set)
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(variables)):
        collection, *parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        numbers[i] = i
        if collection != "params":
            continue
        for depth, name in enumerate(parts):
            module = "/".join(parts[:depth])
            if name in seen.kernels.get(module, ()):
                own[module].add(i)
    seen.layers = known_by_use(seen.layers, own, uses_of(program, numbers))


def _obstacle(module: nn.Module) -> str:
    if isinstance(module, nn.Embed):
        return LOOKUP
    if isinstance(module, nn.Conv | nn.ConvLocal | nn.ConvTranspose):
        return CONVOLUTION
    ours = MatmulModule | FP8GroupedLinear | FP8MoE | ExpertKernels
    return FP8 if isinstance(module, ours) else UNKNOWN


def layer_of(path: str, module: nn.Module, known: Known, args: Any, kwargs: Any) -> Layer:
    """The layer whose known method is called.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxfp8.conversion._linen_layers import KNOWN
      >>> dense = KNOWN[nn.Dense.__call__.__wrapped__]
      >>> layer_of("up", nn.Dense(4), dense, (jnp.ones((2, 8)),), {}).shape
      (2, 8, 4)
    """
    size = known.size(module, *args, **kwargs)
    own = own_matmul(module, ("dot_general", "dot_general_cls"), jax.lax.dot_general)
    obstacle = FP8 if isinstance(module, MatmulModule) else own
    return Layer(
        path=path, type=type(module), shape=size.shape, batch=size.batch, obstacle=obstacle
    )
