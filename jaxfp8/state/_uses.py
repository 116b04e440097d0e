"""Uses of a state: a state in the gradient channel may be used once in a trace.

JAX adds the cotangents of all uses. With `state_channel="gradient"` these are states, and a sum of
states is no state.
"""

import dataclasses
import weakref
from typing import Any

import jax
import jax.extend.core

from jaxfp8._typing import FP8StateError


@dataclasses.dataclass(eq=False)
class _Leaf:
    """A traced array of a state.

    Attributes:
      leaf: the tracer. Its memory may be used again later, so its address does not identify it.
      differentiated: the uses that a gradient goes through.
    """

    leaf: weakref.ReferenceType[Any]
    differentiated: list["Use"] = dataclasses.field(default_factory=list)


# An entry lives as long as one of its uses, which the trace holds.
_leaves: weakref.WeakValueDictionary[int, _Leaf] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """One use of a state while a function is traced.

    Attributes:
      leaf: the array that identifies the state; None if it is no tracer.
      trace: the trace of the use. The branches of `lax.cond` may each use a state once, and each
        has a trace of its own.
    """

    leaf: _Leaf | None
    trace: Any

    @classmethod
    def of(cls, array: Any) -> "Use":
        """A use of the state that has this array.

        Example:
          >>> import jax.numpy as jnp
          >>> Use.of(jnp.ones(3)).leaf is None
          True
        """
        if not isinstance(array, jax.core.Tracer):
            return cls(None, None)
        entry = _leaves.get(id(array))
        if entry is None or entry.leaf() is not array:
            entry = _leaves[id(array)] = _Leaf(weakref.ref(array))
        return cls(entry, jax.extend.core.get_opaque_trace_state(convention="jaxfp8"))

    def differentiate(self) -> None:
        """Note that a gradient goes through this use.

        It may be called again, because JAX may run a forward rule several times.

        Raises:
          FP8StateError: if a gradient goes through another use of the state in the same trace.

        Example:
          >>> import jax.numpy as jnp
          >>> Use.of(jnp.ones(3)).differentiate()
        """
        if self.leaf is None:
            return
        others = self.leaf.differentiated
        if any(other is not self and other.trace == self.trace for other in others):
            raise FP8StateError(
                'a state with state_channel="gradient" is used twice in one loss, by a shared '
                "layer or by tied layers. JAX would add the states of both uses. Use "
                "fp8.value_and_grad and state_channel=None. Without flax, call "
                "fp8.state.in_gradient_channel(state) once, and pass what fp8.fork gives to the "
                "matmuls, with state_channel=None. For a use that the loss does not train, pass "
                "jax.lax.stop_gradient(fp8.freeze(state))."
            )
        if self not in others:
            others.append(self)
