"""`release`: each layer is updated in its backward pass."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxfp8._typing import Array, PyTree
from jaxfp8.jaxprs._data_flow import labels_of, union_of_labels
from jaxfp8.optim._moments import MomentFormatsState
from jaxfp8.optim._release_scan import Operands, release_scan
from jaxfp8.optim._released import SEAL, Released, carriers_of, count_layers, unpack_state
from jaxfp8.optim._weights import is_float
from jaxfp8.sharding._amax import manual_axes, types_show_varying
from jaxfp8.weights._quantized_weight import is_weight

# Whether an optimizer couples parameters, read from its program.
#
# Released layers are updated one after another. At the update of a layer the gradients of other
# layers do not exist. So a norm over all gradients cannot be computed. The traced program of one
# layer shows whether the optimizer needs one: is the update of one parameter computed from another?

_CURE = (
    "Each layer is updated before the gradients of other layers exist, so nothing can be computed "
    "from all of them. release(tx, per_layer=True) applies the optimizer to each layer alone, as "
    "jax.vmap(tx.update) does"
)


def _check_uncoupled(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raise ValueError if an update may couple parameters.

    The update of a parameter must not depend on another parameter or its gradient, in any number of
    steps. An array of the optimizer state must not depend on several of them.
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    alone = len(names) == 1
    if alone:  # two copies stand for those of two layers
        params = jax.tree.map(lambda x: [x, x], params)
        names = [names[0], f"{names[0]} of another layer"]
    try:
        updates, state = _labels_after_steps(tx, params)
    except Exception as error:
        error.add_note(
            "release traced tx.init(params) and tx.update(grads, state, params) with the "
            f"parameters of one layer{', as a list of two copies' if alone else ''}. It gives no "
            "other arguments, such as value=, because a layer is updated before the loss is known. "
            "Use an optimizer that needs none. If the optimizer works with one layer and couples "
            "no parameters, write release(tx, per_layer=True), which traces nothing here."
        )
        raise
    for i, name in enumerate(names):
        others = updates[i] & ~(1 << i)
        if others:
            raise ValueError(
                f"the optimizer couples parameters: the update of {name} depends on the gradient "
                f"or the value of {_listed(others, names)}. {_CURE}. To clip each parameter, use "
                "optax.clip_by_block_rms or optax.adaptive_grad_clip."
            )
    for place, labels in state.items():
        if labels & (labels - 1):  # more than one bit
            raise ValueError(
                f"the optimizer couples parameters: state{place}, an array in its state, depends "
                f"on the gradients or the values of {_listed(labels, names)}. {_CURE}, with such "
                "an array for each layer."
            )


def _labels_after_steps(
    tx: optax.GradientTransformation, params: PyTree
) -> tuple[list[int], dict[str, int]]:
    """The parameters that each update, and each array of the state, depends on after any steps."""
    # Label i is parameter i, or its gradient.
    leaves, flat = jax.tree.flatten(params)
    treedef: Any = flat  # jax gives it no type
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    start, state_types = jax.make_jaxpr(tx.init, return_shape=True)(types)
    step, (update_types, new_types) = jax.make_jaxpr(tx.update, return_shape=True)(
        types, state_types, types
    )
    found: Any = jax.tree.structure(new_types)
    needed: Any = jax.tree.structure(state_types)
    if found != needed:
        raise ValueError(
            f"tx.update returns another state than tx.init: {found} instead of {needed}. A "
            "Released needs the same tree of arrays in all steps."
        )
    own = [1 << i for i in range(len(leaves))]
    state = labels_of(start, own)
    while True:
        outs = labels_of(step, [*own, *state, *own])
        new = outs[len(outs) - len(state) :]
        after = [old | each for old, each in zip(state, new, strict=True)]
        # A state remembers earlier steps. So a coupling may need several to reach an update.
        if after == state:
            break
        state = after
    # An update is an array, an `Overwrite` with one, or nothing.
    sizes = [len(jax.tree.leaves(each)) for each in treedef.flatten_up_to(update_types)]
    left = iter(outs)
    updates = [union_of_labels(itertools.islice(left, size)) for size in sizes]
    places = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state_types)]
    return updates, dict(zip(places, state, strict=True))


def _listed(labels: int, names: list[str]) -> str:
    """The names of labels. A layer may have many parameters, so at most three."""
    found = [name for i, name in enumerate(names) if labels >> i & 1]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


# Gradients of layers that the optimizer uses as soon as they exist.

_GOLDEN = np.uint32(0x9E3779B9)  # an odd number, so that the seeds of 2^32 layers differ


@dataclasses.dataclass(frozen=True)
class Release:
    """What `release` returns.

    Attributes:
      tx: the optimizer of one layer.
      per_layer: whether the optimizer may couple the parameters of a layer.

    Example:
      >>> release(optax.sgd(0.1)).init({"w": jnp.ones((3, 4))}).params["w"].shape
      (3, 4)
    """

    tx: optax.GradientTransformation
    per_layer: bool = False

    def init(self, params: PyTree) -> Released:
        """Start training at stacked parameters.

        The optimizer state is that of `jax.vmap(tx.init)`. Only the seeds of stochastic rounding
        differ from layer to layer.

        Args:
          params: a tree of float arrays [L, ...] for L layers.

        Raises:
          ValueError: if the optimizer couples parameters, see `release`, or if the arrays do not
            have the same first axis.
          TypeError: if a parameter or an array of the optimizer state has a dtype that cannot
            leave a backward pass, or if the optimizer needs the loss or other arguments.
        """
        layers = count_layers(params)
        return self.pack(params, _seeded(jax.vmap(self.tx.init)(params), layers))

    def pack(self, params: PyTree, opt_state: PyTree) -> Released:
        """Continue training at stacked parameters and their optimizer state.

        `Released.params` and `Released.opt_state` are the inverse.

        Args:
          params: a tree of float arrays [L, ...] for L layers.
          opt_state: of `jax.vmap(tx.init)`, `jax.vmap(partial(init_master_weights, tx))` or of a
            checkpoint: [L, ...] each.

        Raises:
          ValueError, TypeError: as `init`.

        Example:
          >>> tx = optax.adam(1e-3)
          >>> params = {"w": jnp.ones((3, 4, 4))}
          >>> layers = release(tx).pack(params, jax.vmap(tx.init)(params))
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight):
            if is_weight(leaf) or not is_float(leaf):
                raise TypeError(
                    f"params{jax.tree_util.keystr(path)} is "
                    f"{leaf if is_weight(leaf) else jnp.result_type(leaf)}. Released parameters "
                    "must be arrays of floats. Scan over other arrays beside them, and train "
                    "weights in FP8 with the usual update."
                )
        leaves, treedef = jax.tree.flatten(opt_state)
        count_layers((params, leaves))
        carriers = [carriers_of(jnp.asarray(leaf)) for leaf in leaves]
        if not self.per_layer:
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
            _check_uncoupled(self.tx, one)
        seal = lax.bitcast_convert_type(jnp.asarray(SEAL), jnp.float32)
        return Released(params, carriers, seal, tuple(map(jnp.result_type, leaves)), treedef)

    def scan(
        self, f: Callable[[Any, Any], tuple[Any, Any]], init: PyTree, xs: PyTree
    ) -> tuple[PyTree, PyTree]:
        """`jax.lax.scan` over layers, whose backward pass updates each layer.

        `jax.grad` and `fp8.value_and_grad` with respect to the `Released` give the next one. Other
        gradients are as usual: those of `init`, of the rest of `xs`, and of what `f` closes over.

        Args:
          f: `f(carry, x) -> (carry, y)` of one layer. x has the parameters of the layer in the
            place of the `Released`. Wrap it in `jax.checkpoint` as in a `jax.lax.scan`.
          init: the first carry. It has an array of floats.
          xs: a tree of arrays [L, ...], in which one node is a `Released`.

        Returns:
          The last carry, and the stacked y.

        Raises:
          ValueError: if xs does not have one `Released`, if only a part of it is differentiated, or
            inside `shard_map(check_vma=False)`.

        Example:
          >>> stack = release(optax.sgd(0.5))
          >>> layers = stack.init({"w": jnp.ones((3, 2)), "b": jnp.zeros((3, 2))})
          >>> def loss_fn(layers, x):
          ...     y, _ = stack.scan(lambda x, p: (x * p["w"] + p["b"], None), x, layers)
          ...     return jnp.sum(y)
          >>> jax.grad(loss_fn)(layers, jnp.ones(2)).params["b"][:, 0]
          Array([-0.5, -0.5, -0.5], dtype=float32)
        """
        if manual_axes() and not types_show_varying():
            raise ValueError(
                f"Release.scan inside shard_map(check_vma=False) or pmap over {manual_axes()}: a "
                "layer is updated before its gradients are reduced over the mesh. Use "
                "jax.shard_map with check_vma=True, which reduces them in each layer."
            )
        nodes, treedef = jax.tree.flatten(xs, is_leaf=_is_released)
        places = [i for i, node in enumerate(nodes) if _is_released(node)]
        if len(places) != 1:
            raise ValueError(
                f"xs has {len(places)} nodes of Released, but Release.scan needs one. Make it by "
                "release(tx).init(params), with the parameters of all layers in one tree."
            )
        (place,) = places
        layers: Released = nodes.pop(place)
        count_layers((layers._values, nodes))
        if not any(map(is_float, jax.tree.leaves(init))):
            raise ValueError(
                f"init={init!r} has no array of floats. Release.scan needs one: the activations "
                "that go from layer to layer."
            )
        init = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), init)

        def of_layer(carry: PyTree, params: PyTree, others: list[Array]) -> tuple[PyTree, PyTree]:
            x = jax.tree.unflatten(treedef, [*others[:place], params, *others[place:]])
            return f(carry, x)

        first = jax.tree.map(
            lambda x: lax.index_in_dim(jnp.asarray(x), 0, keepdims=False), (layers._values, nodes)
        )
        # `jax.closure_convert` would leave integers inside, and each layer would keep a copy.
        traced, types = jax.make_jaxpr(of_layer, return_shape=True)(init, *first)

        def body(carry: PyTree, params: PyTree, others: list[Array], consts: list[Array]) -> Any:
            flat = jax.tree.leaves((carry, params, others))
            outs = jax.core.eval_jaxpr(traced.jaxpr, consts, *flat)
            return jax.tree.unflatten(jax.tree.structure(types), outs)

        def update(grads: PyTree, params: PyTree, carriers: Any) -> tuple[PyTree, PyTree]:
            """The next parameters and carriers of one layer."""
            opt_state = unpack_state(carriers, layers.dtypes, layers.treedef)
            updates, new_state = self.tx.update(grads, opt_state, params)
            leaves, found = jax.tree.flatten(new_state)
            if found != layers.treedef or tuple(map(jnp.result_type, leaves)) != layers.dtypes:
                raise ValueError(
                    f"tx.update returns another state than Released has: {found} instead of "
                    f"{layers.treedef}. Make the Released by init of the same Release."
                )
            return optax.apply_updates(params, updates), list(map(carriers_of, leaves))

        operands = Operands(init, layers._values, nodes, traced.consts)
        return release_scan(body, update, operands, layers.carriers, layers.seal)


def release(tx: optax.GradientTransformation, *, per_layer: bool = False) -> Release:
    """Gradient release: update a layer in the backward pass, as soon as its gradient exists.

    Then at most one layer's gradient is in memory, instead of the gradients of all layers.

    The optimizer state is that of `jax.vmap(tx.init)` over the stacked parameters. So a scale that
    a tensor has, as in `FP8` moments, is one for each layer. `optax.apply_if_finite` skips single
    layers. The result is that of `jax.vmap(tx.update)` on stacked gradients.

    An optimizer couples parameters if the update of one depends on another or its gradient. The
    traced program of `tx` tells it. An array in the optimizer state must not depend on several.

    Args:
      tx: an optimizer of optax, also with `with_moment_formats` or `with_master_weights`.
      per_layer: True accepts an optimizer that couples parameters. It then couples those of one
        layer: `optax.clip_by_global_norm` clips the gradient of each layer by the layer's own norm.

    Returns:
      A `Release`. Its `init` raises ValueError if `tx` couples parameters and `per_layer` is False.

    References:
      Lv et al., LOMO, arXiv:2306.09782, section 3.1 (the fused backward pass).
      FlashOptim, arXiv:2602.23349 (gradient release with optimizer states of 8 bits).

    Example:
      >>> stack = release(optax.adam(1e-3))
      >>> layers = stack.init({"w": jnp.ones((3, 4, 4))})  # three layers
      >>> def loss_fn(layers, x):
      ...     y, _ = stack.scan(lambda x, p: (jnp.tanh(x @ p["w"]), None), x, layers)
      ...     return jnp.mean(y)
      >>> loss, layers = jax.value_and_grad(loss_fn)(layers, jnp.ones((2, 4)))
      >>> layers.opt_state[0].count
      Array([1, 1, 1], dtype=int32)
    """
    return Release(tx, per_layer)


def _is_released(node: Any) -> bool:
    return isinstance(node, Released)


def _seeded(opt_state: PyTree, layers: int) -> PyTree:
    """A stacked optimizer state in which stochastic rounding has a seed for each layer."""

    def one(node: Any) -> Any:
        if not isinstance(node, MomentFormatsState):
            return node
        return node._replace(seed=node.seed + jnp.arange(layers, dtype=jnp.uint32) * _GOLDEN)

    return jax.tree.map(one, opt_state, is_leaf=lambda node: isinstance(node, MomentFormatsState))
