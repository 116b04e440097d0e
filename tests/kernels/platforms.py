"""What the tests of programs for several platforms share."""

import jax


def types(tree):
    """Shapes and dtypes, in no mesh."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def text_for(platform, function, *arguments):
    """The program of a platform, as XLA gets it."""
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
