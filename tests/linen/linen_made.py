"""Variables of a module, without a program that computes them."""

import jax
import numpy as np

import jaxfp8 as fp8


def made(module, *inputs, recipe=None, dtype=None):
    """Numbers as large as those of `init`, and unset states of the recipe.

    Args:
      module: of linen.
      *inputs: what `init` takes.
      recipe: of all layers. Default: `module.recipe`.
      dtype: of the parameters. Default: that of `init`.
    """
    random = np.random.default_rng(0)
    recipe = getattr(module, "recipe", None) if recipe is None else recipe
    is_state = lambda node: isinstance(node, fp8.state.MatmulState)

    def filled(node):
        if is_state(node):
            leaves, tree = jax.tree.flatten(node)
            unset = jax.tree.leaves(fp8.init_state(recipe))
            stacked = [
                np.array(np.broadcast_to(leaf, like.shape))
                for leaf, like in zip(unset, leaves, strict=True)
            ]
            return jax.tree.unflatten(tree, stacked)
        spread = max(node.shape) ** -0.5 if len(node.shape) > 1 else 0.1
        return (spread * random.standard_normal(node.shape)).astype(dtype or node.dtype)

    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return jax.tree.map(filled, shapes, is_leaf=is_state)
