"""The partition specs of a linen model's quantizer state."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.linen._state import COLLECTION
from jaxfp8.state._state import is_state
from jaxfp8.state._state_specs import state_specs as specs_of_states
from jaxfp8.state._trees import check_tree, shown


def state_specs(state: PyTree, param_specs: PyTree) -> PyTree:
    """`fp8.state_specs` of a linen model.

    A stack of layers, from `nn.scan` or `nn.vmap`, has a stack of states. The mesh splits that
    stack as it splits the leading axes of the layer's `kernel`.

    Args:
      state: the collection `fp8.linen.COLLECTION`, or its types.
      param_specs: a `jax.P` for each parameter, for instance
        `flax.linen.get_partition_spec(variables)["params"]`.

    Returns:
      A tree like `state`, with a `jax.P` for each array.

    Raises:
      FP8StateError: if `state` holds anything but states.
      ValueError: if `param_specs` has no `kernel` for a layer with state.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import COLLECTION, FP8Dense
      >>> variables = FP8Dense(4).init(jax.random.key(0), jnp.ones((2, 8)))
      >>> specs = state_specs(variables[COLLECTION], {"kernel": jax.P("fsdp"), "bias": jax.P()})
      >>> set(jax.tree.leaves(specs))
      {P()}
    """
    if isinstance(state, Mapping) and COLLECTION in state:
        raise FP8StateError(
            f"state holds the whole variables {list(state)}, but only the states are needed. Pass "
            f"variables[{COLLECTION!r}]."
        )
    check_tree(state)

    def kernel_spec(path: tuple[Any, ...]) -> jax.P:
        node = param_specs
        for key in path:
            if not (isinstance(node, Mapping) and key.key in node):
                break  # the path goes on to the module of the matmul, which has no parameters
            node = node[key.key]
        if not (isinstance(node, Mapping) and "kernel" in node):
            raise ValueError(
                f"param_specs is {shown(param_specs)}, which has no kernel for the state at "
                f"{jax.tree_util.keystr(path)}. Give a jax.P for each parameter, for instance "
                'flax.linen.get_partition_spec(variables)["params"]. '
                "For matmuls without a kernel of their own (FP8EinsumOp) use fp8.state_specs."
            )
        return node["kernel"]

    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: kernel_spec(path), state, is_leaf=is_state
    )
    return specs_of_states(state, specs)
