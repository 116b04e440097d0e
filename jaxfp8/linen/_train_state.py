"""flax's `TrainState`, with quantizer state beside the parameters."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax.training.train_state
import jax
import optax
from flax import struct

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.linen._state import COLLECTION
from jaxfp8.state._trees import check_tree
from jaxfp8.weights._quantized_weight import is_weight


class TrainState(flax.training.train_state.TrainState):
    """`flax.training.train_state.TrainState` with the quantizer state of a linen model as a field.

    The optimizer, weight decay and averages of `params` do not touch this field. For a recipe
    without state the field is an empty dict, so the same train step serves all recipes.

    Attributes:
      step: number of optimizer steps so far.
      apply_fn: usually `model.apply`.
      params: the parameters only, without the quantizer state.
      tx: the optax transformation.
      opt_state: state of `tx`.
      fp8_state: the collection `fp8.linen.COLLECTION` of the model.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxfp8.linen import COLLECTION, FP8Dense, TrainState
      >>> import jaxfp8 as fp8
      >>> model, x = FP8Dense(4), jnp.ones((2, 8))
      >>> variables = model.init(jax.random.key(0), x)
      >>> ts = TrainState.create(apply_fn=model.apply, params=variables["params"],
      ...                        fp8_state=variables.get(COLLECTION, {}), tx=optax.adam(1e-3))
      >>> def loss_fn(params, fp8_state, x):
      ...     return jnp.mean(ts.apply_fn({"params": params, COLLECTION: fp8_state}, x) ** 2)
      >>> @jax.jit
      ... def train_step(ts, x):
      ...     loss, grads, fp8_state = fp8.value_and_grad(loss_fn)(ts.params, ts.fp8_state, x)
      ...     return ts.apply_gradients(grads=grads, fp8_state=fp8_state), loss
      >>> ts, loss = train_step(ts, x)
      >>> int(ts.step)
      1
    """

    fp8_state: PyTree = struct.field(pytree_node=True)

    @classmethod
    def create(  # type: ignore[override]  # a forgotten fp8_state would be lost
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: PyTree,
        fp8_state: PyTree,
        tx: optax.GradientTransformation,
        **fields: Any,
    ) -> Self:
        """A state with `step=0` and a fresh optimizer state.

        Args:
          apply_fn: usually `model.apply`.
          params: the parameters, `variables["params"]`.
          fp8_state: the quantizer state, `variables.get(fp8.linen.COLLECTION, {})`.
          tx: an optax transformation.
          **fields: fields of a subclass.

        Raises:
          FP8StateError: if `params` holds the collection, or if `fp8_state` holds anything but
            states.
        """
        _check_params("params", params, "params=variables['params']")
        _check_state(fp8_state)
        created: Self = super().create(
            apply_fn=apply_fn, params=params, tx=tx, fp8_state=fp8_state, **fields
        )
        return created

    def apply_gradients(  # type: ignore[override]
        self, *, grads: PyTree, fp8_state: PyTree, **fields: Any
    ) -> Self:
        """The state after an optimizer step.

        Args:
          grads: gradients of `params`.
          fp8_state: the new quantizer state that `fp8.value_and_grad` returned. After gradient
            accumulation it is `fp8.commit(ts.fp8_state, seen)`.
          **fields: new values of fields of a subclass.

        Raises:
          FP8StateError: if `grads` holds the collection, or if the tree of `fp8_state` is not that
            of `ts.fp8_state`.
        """
        _check_params(
            "grads",
            grads,
            "grads=grads['params'], and fp8_state= the state that fp8.value_and_grad returned",
        )
        _check_state(fp8_state)
        new: Any = jax.tree.structure(fp8_state)
        old: Any = jax.tree.structure(self.fp8_state)
        if new != old:
            raise FP8StateError(
                f"fp8_state has {new.num_leaves} arrays in another tree than the {old.num_leaves} "
                "of this TrainState. Pass the state that fp8.value_and_grad returned for "
                "ts.fp8_state. To change the tree on purpose (fp8.freeze), use ts.replace."
            )
        own = self.replace(tx=_with_state(self.tx, self.params, fp8_state))
        applied: Self = super(TrainState, own).apply_gradients(
            grads=grads, fp8_state=fp8_state, **fields
        )
        return applied.replace(tx=self.tx)


def _with_state(
    tx: optax.GradientTransformation, params: PyTree, fp8_state: PyTree
) -> optax.GradientTransformation:
    """The optimizer, which gets the new quantizer state if it casts weights in FP8."""
    if not any(map(is_weight, jax.tree.leaves(params, is_leaf=is_weight))):
        return tx
    update = optax.with_extra_args_support(tx).update
    return optax.GradientTransformation(tx.init, functools.partial(update, fp8_state=fp8_state))


def _check_params(name: str, tree: PyTree, cure: str) -> None:
    if isinstance(tree, Mapping) and COLLECTION in tree:
        raise FP8StateError(
            f"{name} holds {list(tree.keys())}, but only the parameters are needed. Write {cure}."
        )


def _check_state(fp8_state: PyTree) -> None:
    if isinstance(fp8_state, Mapping) and COLLECTION in fp8_state:
        raise FP8StateError(
            f"fp8_state holds {list(fp8_state.keys())}, but only the quantizer states are needed. "
            f"Write fp8_state=variables[{COLLECTION!r}]."
        )
    if fp8_state is None:
        raise FP8StateError(
            "fp8_state is None, but a dict is needed. Write "
            f"fp8_state=variables.get({COLLECTION!r}, {{}})."
        )
    check_tree(fp8_state)
