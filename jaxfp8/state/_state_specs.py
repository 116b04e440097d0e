"""The partition specs of quantizer state, from those of the weights."""

from typing import Any

import jax

from jaxfp8._typing import PyTree
from jaxfp8.state._state import MatmulState, is_state
from jaxfp8.state._trees import check_tree


def state_specs(state: PyTree, weight_specs: PyTree) -> PyTree:
    """The partition specs of quantizer state.

    The state of one matmul is a few numbers. It is replicated. States of stacked layers, experts or
    pipeline stages have the leading axes of their weights. A mesh splits these axes as it splits
    those of the weights.

    Args:
      state: a tree of `MatmulState`, or its types.
      weight_specs: a tree of the same structure. In the place of each state it has the `jax.P` of
        the weight.

    Returns:
      The tree of states, with a `jax.P` in the place of each array. Use it for `in_specs`,
      shardings or checkpoints.

    Raises:
      FP8StateError: if `state` holds anything but states.
      ValueError: if the trees differ.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8 as fp8
      >>> stages = jax.vmap(lambda _: fp8.init_state(fp8.recipes.delayed()))(jnp.zeros(4))
      >>> state_specs({"up": stages}, {"up": jax.P("pipe", "fsdp", "tensor")})["up"].scale
      P('pipe',)
    """
    check_tree(state)
    places = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_state)
    ]
    leaves = jax.tree_util.tree_leaves_with_path(
        weight_specs, is_leaf=lambda node: node is None or isinstance(node, jax.P)
    )
    specs = {jax.tree_util.keystr(path): spec for path, spec in leaves}
    specs = {place: spec for place, spec in specs.items() if spec is not None or place in places}
    if set(places) != set(specs):
        raise ValueError(
            f"weight_specs has leaves at {list(specs)[:6]}, but the states are at {places[:6]}. "
            "Give one jax.P for each state."
        )

    def one(path: tuple[Any, ...], state: MatmulState) -> MatmulState:
        spec = specs[jax.tree_util.keystr(path)]
        if not isinstance(spec, jax.P):
            raise ValueError(
                f"weight_specs has {spec!r} in the place of the state of a matmul. Write the jax.P "
                "of its weight there."
            )
        # The axes of a state before its rows are the leading axes of the weight.
        return jax.tree.map(lambda _: jax.P(*spec[: state.scale.ndim - 1]), state)

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=is_state)
