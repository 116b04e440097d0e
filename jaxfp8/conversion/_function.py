"""Functions of parameters and inputs, for models that are no modules of flax."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._call import Example
from jaxfp8._typing import Array, FP8StateError, PyTree
from jaxfp8.conversion._plan import Decision, Plan, modules_of
from jaxfp8.conversion._read import Extra, Reading, note_weights, number_parameters, read_and_run
from jaxfp8.conversion._rule import Layer, Seen
from jaxfp8.jaxprs._flops import flops_of
from jaxfp8.jaxprs._rewrite import Traced, is_array
from jaxfp8.state._init import unset_state
from jaxfp8.state._state import MatmulState


class FP8Function:
    """A function whose matmuls of parameters run in FP8. `fp8.convert` makes it.

    It takes the arguments of the function that it was made from, and the keywords `fp8_state` for
    recipes with state, and `fp8_key` for stochastic rounding.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> params, x = {"w": jnp.ones((8, 4))}, jnp.ones((2, 8))
      >>> forward = lambda params, x: jnp.tanh(x @ params["w"])
      >>> forward, coverage = fp8.convert(forward, fp8.recipes.delayed(), inputs=(params, x))
      >>> loss_fn = lambda params, state: forward(params, x, fp8_state=state).sum()
      >>> loss, grads, state = fp8.value_and_grad(loss_fn)(params, forward.init_state())
      >>> sorted(state)
      ['w']
    """

    def __init__(self, function: Callable[..., Any], plan: Plan) -> None:
        self.fp8_plan = plan
        self._function = function

    def init_state(self) -> dict[str, MatmulState]:
        """A fresh state for each matmul, by the path of its row. Empty for recipes without."""
        decided = dict(self.fp8_plan.decided)
        recipes = ((path, decided[path].recipe, loops) for path, loops in self.fp8_plan.reads)
        return {
            path: unset_state(recipe.rows, loops)
            for path, recipe, loops in recipes
            if recipe is not None and recipe.rows
        }

    def __call__(
        self,
        params: PyTree,
        *args: Any,
        fp8_state: Mapping[str, MatmulState] = types.MappingProxyType({}),
        fp8_key: Array | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the function.

        Args:
          params: its first argument, the tree of parameters.
          *args: its other arguments.
          fp8_state: the quantizer states, from `init_state` or `fp8.value_and_grad`.
          fp8_key: a PRNG key for recipes that round stochastically, another one at each step.
          **kwargs: its keyword arguments.

        Raises:
          FP8StateError: if the state of a matmul is missing.
        """

        def extra_of(layer: Layer, decision: Decision, loops: tuple[int, ...]) -> Extra:
            del loops
            recipe = decision.recipe
            assert recipe is not None
            key = fp8_key if recipe.needs_key else None
            if not recipe.rows:
                return Extra(key=key)
            if layer.path not in fp8_state:
                raise FP8StateError(
                    f"fp8_state has no state for {layer.path!r}, which recipe {recipe.name!r} "
                    f"needs. It has {sorted(fp8_state)}. Pass the states of init_state() or of the "
                    "last step. If inputs= of fp8.convert did not run this matmul, give it inputs= "
                    "that do."
                )
            return Extra(fp8_state[layer.path], key)

        return read_and_run(
            self._run,
            (params, args, kwargs),
            _parameters_of(params),
            Reading.of(self.fp8_plan),
            extra_of,
        )

    def _run(self, params: PyTree, args: Any, kwargs: Any) -> Any:
        return self._function(params, *args, **kwargs)


def _parameters_of(params: PyTree) -> dict[int, str]:
    """The path of each parameter, by its number among the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        number: jax.tree_util.keystr(path, simple=True, separator="/")
        for number, (path, leaf) in enumerate(leaves)
        if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def look(function: Callable[..., Any], plan: Plan, example: Example) -> Seen:
    """The matmuls of a function, as a call shows them. Nothing is computed."""
    del plan
    params, *args = example.args
    traced = Traced(
        lambda params, args, kwargs: function(params, *args, **kwargs), params, args, example.kwargs
    )
    seen = Seen(modules={"": type(function)})
    # Blocks are known by their paths.
    modules = modules_of(_parameters_of(params).values())
    seen.modules |= dict.fromkeys(sorted(modules), type(function))
    seen.flops, seen.in_loops = flops_of(traced.program.jaxpr)
    numbers, paths = number_parameters(traced.leaves, _parameters_of(params))
    note_weights(seen, traced.program, numbers, paths, {})
    return seen


def converted(function: Callable[..., Any], plan: Plan, example: Example, rngs: Any) -> FP8Function:
    """The function with the matmuls in FP8 that the plan says, after it was traced once."""
    del rngs  # a call takes its key
    new = FP8Function(function, plan)
    state, key = new.init_state(), jax.random.key(0)
    example.shapes(lambda *args, **kwargs: new(*args, fp8_state=state, fp8_key=key, **kwargs))
    return new
