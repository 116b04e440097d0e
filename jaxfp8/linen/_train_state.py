"""`TrainState` with quantizer state, and `add_state` for models that were trained without it."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax.linen as nn
import flax.training.train_state
import jax
import optax
from flax import struct
from flax.core import meta, unfreeze

from jaxfp8._call import Example
from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.linen._state import COLLECTION, refuse_variables
from jaxfp8.state._init import make_concrete
from jaxfp8.state._saved import match_leaves, names_of, saved_leaves
from jaxfp8.state._state import check_tree, describe_node
from jaxfp8.weights._quantized_weight import is_weight

# flax's `TrainState`, with quantizer state beside the parameters.


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
        refuse_variables("params", params, "the parameters", "params=variables['params']")
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
        cure = "grads=grads['params'], and fp8_state= the state that fp8.value_and_grad returned"
        refuse_variables("grads", grads, "the parameters", cure)
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


def _check_state(fp8_state: PyTree) -> None:
    cure = f"fp8_state=variables[{COLLECTION!r}]"
    refuse_variables("fp8_state", fp8_state, "the quantizer states", cure)
    if fp8_state is None:
        raise FP8StateError(
            "fp8_state is None, but a dict is needed. Write "
            f"fp8_state=variables.get({COLLECTION!r}, {{}})."
        )
    check_tree(fp8_state)


# `add_state`: a linen model's variables from a checkpoint without quantizer state.


def add_state(
    variables: PyTree,
    model: nn.Module,
    *args: Any,
    rename: Mapping[str, str] = types.MappingProxyType({}),
    **kwargs: Any,
) -> dict[str, Any]:
    r"""The variables of a checkpoint without quantizer state, with fresh state of an FP8 model.

    Nothing is computed to find what the model needs: `model.init` is traced. The arrays of the
    checkpoint are returned as they are. An array of a narrower dtype is converted to that of the
    model, for instance from bfloat16 to float32. A conversion that would round is an error.

    Args:
      variables: the variables of the checkpoint, `{"params": ...}`, with the other collections of
        the model (`"batch_stats"`). They may be restored without a target, from orbax or msgpack.
        Collections that a call makes, such as a cache, may be missing.
      model: the model that will run, with FP8 layers or from `fp8.convert`.
      *args: the positional arguments of a call of the model. Arrays may be
        `jax.ShapeDtypeStruct`s.
      rename: regular expressions of names, and what replaces them. A name is one part of a path
        below the collection. The whole name must match, and the first pattern that matches
        decides. Layers without a name are called after their class:
        `rename={r"Dense_(\d+)": r"FP8Dense_\1"}`.
      **kwargs: the keyword arguments of the call.

    Returns:
      Variables with the tree of `model.init`, boxes included (`nn.Partitioned`). The state is in
      the collection `fp8.linen.COLLECTION`, as NumPy arrays, which fit a mesh of any size. If the
      recipes have no state, there is no such collection.

    Raises:
      TypeError: if `model` is no unbound linen module, or `rename` is no dict of strings.
      FP8StateError: if `variables` hold quantizer state.
      ValueError: if `variables` lack an array of the model, hold another one, or hold one of
        another shape or a wider dtype. Also if a pattern of `rename` matches no name, or makes one
        name of two.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x = jnp.ones((8, 32))
      >>> old = nn.Dense(16).init(jax.random.key(0), x)
      >>> model = fp8.linen.FP8Dense(16)
      >>> sorted(fp8.linen.add_state(old, model, x))
      ['_overwrite_with_gradient', 'params']
    """
    if not isinstance(model, nn.Module) or model.scope is not None:
        what = "a bound module" if isinstance(model, nn.Module) else describe_node(model)
        raise TypeError(
            f"model is {what}, but an unbound flax.linen.Module is needed. Write for instance "
            "add_state(variables, FP8Dense(16), x). For nnx see fp8.nnx.add_state."
        )
    _check_variables(variables)
    keys = {"params": jax.random.key(0)}  # flax draws from it for every stream that is missing
    types_of = Example(args, kwargs).shapes(lambda *a, **k: nn.Module.init(model, keys, *a, **k))
    fresh: dict[str, Any] = dict(unfreeze(types_of))
    states = make_concrete(fresh.pop(COLLECTION, {}))
    check_tree(states)
    # What a call sows or caches is in no checkpoint. A call makes it anew, or flax names it.
    for name in set(fresh) - {"params", "batch_stats"} - set(variables):
        del fresh[name]
    wanted = saved_leaves(fresh, {}, called="model", read=_unboxed)
    given = saved_leaves(variables, rename, called="variables", read=_unboxed, kept=1)
    found = match_leaves(wanted, given, called="variables", optional=())

    def joined(path: Any, node: Any) -> Any:
        array = found[names_of(path)]
        return node.replace_boxed(array) if isinstance(node, meta.AxisMetadata) else array

    new: dict[str, Any] = jax.tree_util.tree_map_with_path(joined, fresh, is_leaf=_is_box)
    return new | ({COLLECTION: states} if states else {})


def _check_variables(variables: Any) -> None:
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"variables is {describe_node(variables)}, but a dict of collections is needed. Write "
            "{'params': params}."
        )
    if COLLECTION in variables:
        raise FP8StateError(
            f"variables already hold the collection {COLLECTION!r}, but a checkpoint without "
            "quantizer state is needed. If it is this model's, use the variables as they are, and "
            f"check the state with fp8.check_state(variables[{COLLECTION!r}], like). If it is "
            "another library's, leave the collection out."
        )
    if "params" not in variables:
        raise ValueError(
            f"variables hold {sorted(map(str, variables))[:8]}, but no collection 'params'. Write "
            "{'params': params}, with the other collections of the model beside it."
        )


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def _unboxed(node: Any) -> Any:
    """The array in a box. `unbox` of flax's own boxes would also place it on a mesh."""
    if isinstance(node, meta.Partitioned):
        return node.value
    return node.unbox() if isinstance(node, meta.AxisMetadata) else node
