"""What a traced program does."""

import jax


def count(jaxpr, name):
    """The number of operations whose name starts with `name`, in all subprograms, as often as they
    are called.
    """
    parameters = jax.tree.leaves([list(e.params.values()) for e in jaxpr.eqns])
    inner = [p.jaxpr if hasattr(p, "jaxpr") else p for p in parameters]
    own = sum(e.primitive.name.startswith(name) for e in jaxpr.eqns)
    return own + sum(count(p, name) for p in inner if hasattr(p, "eqns"))
