"""What really went through a matmul.

The largest magnitudes of x, w and g, told to the host by the running program.
"""

import functools
import threading

import jax
import numpy as np

TENSORS = ("x", "w", "g")


class Truth:
    """The largest |x|, |w|, |g| that any device or loop iteration saw, for each stacked state it
    belongs to.
    """

    def __init__(self):
        self.largest = {}
        self.lock = threading.Lock()  # each device calls from a thread of its own

    def see(self, tensor, at, value):
        key, amax = (tensor, int(at)), float(np.max(np.abs(np.asarray(value, np.float64))))
        with self.lock:
            self.largest[key] = max(self.largest.get(key, 0.0), amax)

    def amax(self, lead):
        """[*lead, 3]; waits for the program."""
        jax.effects_barrier()
        found = [
            [self.largest.get((tensor, at), 0.0) for tensor in TENSORS]
            for at in range(int(np.prod(lead)))
        ]
        return np.asarray(found, np.float32).reshape(*lead, 3)

    def watch(self, apply):
        """`apply(w, state, x)` with all three tensors told to the host; `at` numbers the state."""

        def watched(w, state, x, at=0):
            at = np.int32(at) if isinstance(at, int) else at
            return _watch_gradient(
                self, apply(_watch(self, "w", w, at), state, _watch(self, "x", x, at)), at
            )

        return watched


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _watch(truth, tensor, value, at):
    jax.debug.callback(functools.partial(truth.see, tensor), at, value)
    return value


_watch.defvjp(
    lambda truth, tensor, value, at: (_watch(truth, tensor, value, at), None),
    lambda truth, tensor, _, g: (g, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watch_gradient(truth, value, at):
    return value


def _tell(truth, at, gradient):
    jax.debug.callback(functools.partial(truth.see, "g"), at, gradient)
    return gradient, None


_watch_gradient.defvjp(lambda truth, value, at: (value, at), _tell)
