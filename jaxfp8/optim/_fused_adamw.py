"""`fused_adamw`: AdamW with stored moments and master weights, as one Triton kernel a weight."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfp8._typing import ArrayLike, PyTree
from jaxfp8.kernels.adamw._api import TRITON
from jaxfp8.kernels.adamw._step import GROUP, AdamWStep
from jaxfp8.optim._eight_bit_formats import ExpandedFP8, ExpandedFP8State, Int8, Int8State
from jaxfp8.optim._master_weights import MasterWeightsState, with_master_weights
from jaxfp8.optim._masters import BFloat16Plus, BFloat16PlusState, Float32
from jaxfp8.optim._moment_formats import PerParameter, thresholds
from jaxfp8.optim._moments import MomentFormatsState, restore_moment_nodes
from jaxfp8.optim._optimizers import adamw
from jaxfp8.optim._weights import Overwrite, Parameters, dtype_of


def fused_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    moments: Int8 | ExpandedFP8 | PerParameter | None = None,
    master: BFloat16Plus | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`adamw` and `with_master_weights` in one Triton kernel for each weight, on NVIDIA GPUs.

    The kernel reads and writes each state once, in place. XLA's program for `adamw` reads them
    twice. Other platforms run `with_master_weights(adamw(...), master=master)`, which has the same
    state. So a checkpoint of one can be loaded by the other. Their results differ in last bits.

    The kernel updates the weights whose last axis has whole groups of 128 values, and whose moments
    are stored. Other parameters are updated by XLA, in the same program. Updates are `Overwrite`s,
    so this must be the outermost transformation that changes updates.

    `optax.apply_if_finite` cannot be around it. Write `tx.update(grads, opt_state, params,
    skip=~finite)` instead. A skipped step changes nothing, and the kernel then moves no bytes.

    On an H200 it took 1.2 to 1.5 times as long as XLA's program (docs/optimizers.md). It needs no
    temporary memory.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      eps_root: added to the second moment.
      weight_decay: times the learning rate.
      mask: which parameters decay, as in `optax.adamw`.
      moments: the format of both moments: `Int8()`, the default, or `ExpandedFP8()`. Or a
        `PerParameter` of these and `Float32()`. XLA updates the parameters with `Float32()`.
      master: `BFloat16Plus(bits=8)` or `BFloat16Plus(bits=16)` for bfloat16 weights, or None for
        float32 weights.

    Raises:
      ValueError: for other formats and master weights, and for constants that are no Python
        numbers.
      NotImplementedError: by `update`, if jax-triton cannot be imported.

    References:
      FlashOptim, arXiv:2602.23349 (one kernel for an update in few bytes).

    Example:
      >>> tx = fused_adamw(1e-3)
      >>> tx.init({"w": jnp.ones((64, 128))}).inner[0].mu["w"].roots.dtype.name
      'int8'
    """
    moments = Int8() if moments is None else moments
    _check(moments, master, b1=b1, b2=b2, eps=eps, eps_root=eps_root, weight_decay=weight_decay)
    plain = adamw(learning_rate, b1, b2, eps, eps_root, weight_decay, mask, mu=moments, nu=moments)
    if master is not None:
        plain = with_master_weights(plain, master=master)

    def update(
        grads: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        skip: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError(
                "params=None: fused_adamw needs the parameters. Call "
                "tx.update(grads, opt_state, params)."
            )
        if skip is not None and jnp.shape(skip):
            raise ValueError(f"skip={skip!r} must be one bool, with shape ().")
        state = restore_moment_nodes(state)
        updates, new = plain.update(grads, state, params, **extra_args)
        tree = Parameters.of(params)
        values = list(map(_new_value, tree.leaves, tree.like(updates)))
        if skip is not None:
            keep = functools.partial(jnp.where, skip)
            values, new = jax.tree.map(keep, (tree.leaves, state), (values, new))
        before, after = _Columns.of(state, tree), _Columns.of(new, tree)
        after.weight[:] = values
        gradients = tree.like(grads)
        chosen = [
            i for i, gradient in enumerate(gradients) if _fits(tree.leaves[i], gradient, before, i)
        ]
        count = _adam_state(state).count
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        step = optax.safe_increment(count)
        decays = _decays(mask, tree)
        results = TRITON(
            [(*before.row(i), gradients[i]) for i in chosen],
            (
                jnp.asarray(rate),
                1 / (1 - b1**step),
                1 / (1 - b2**step),
                thresholds(_moments_of(state).step, ()),
                jnp.asarray(False if skip is None else skip),
            ),
            [after.row(i) for i in chosen],
            steps=[
                AdamWStep(
                    b1=b1, b2=b2, eps=eps, eps_root=eps_root,
                    weight_decay=weight_decay if decays[i] else 0.0,
                )
                for i in chosen
            ],
        )  # fmt: skip
        for i, row in zip(chosen, results, strict=True):
            for column, each in zip(after, row, strict=True):
                column[i] = each
        written = tree.tree([jax.tree.map(Overwrite, each) for each in after.weight])
        return written, after.in_state(new, tree)

    return optax.GradientTransformationExtraArgs(plain.init, update)


class _Columns(NamedTuple):
    """What an optimizer state holds for each parameter. `weight` is the parameter itself."""

    first: list[Any]
    second: list[Any]
    weight: list[Any]
    low: list[Any]  # the remainders of master weights, or None

    @staticmethod
    def of(state: Any, tree: Parameters) -> "_Columns":
        adam, weights = _adam_state(state), list(tree.leaves)
        has_masters = isinstance(state, MasterWeightsState)
        low = tree.like(state.masters.low) if has_masters else [None] * len(weights)
        return _Columns(tree.like(adam.mu), tree.like(adam.nu), weights, low)

    def row(self, i: int) -> tuple[Any, ...]:
        """All of one parameter, in the order of the kernel's `Weight`."""
        return tuple(column[i] for column in self)

    def in_state(self, state: Any, tree: Parameters) -> Any:
        """A state with these columns. Weights are not in it."""
        if isinstance(state, MasterWeightsState):
            assert isinstance(state.masters, BFloat16PlusState)  # `fused_adamw` takes no others
            masters = state.masters._replace(low=tree.tree(self.low))
            return MasterWeightsState(masters, self.in_state(state.inner, tree))
        adam, *others = state.inner
        adam = adam._replace(mu=tree.tree(self.first), nu=tree.tree(self.second))
        return state._replace(inner=(adam, *others))


def _adam_state(state: Any) -> Any:
    """The state of `optax.scale_by_adam` in that of `adamw`, with master weights or without."""
    return _moments_of(state).inner[0]


def _moments_of(state: Any) -> MomentFormatsState:
    return state.inner if isinstance(state, MasterWeightsState) else state


def _new_value(leaf: Any, change: Any) -> Any:
    """The new value of a parameter, an array or a tree, from the update of it."""

    def one(p: Any, update: Any) -> Any:
        return update.value if isinstance(update, Overwrite) else jnp.asarray(p + update, p.dtype)

    return jax.tree.map(one, leaf, change)


def _fits(weight: Any, gradient: Any, states: _Columns, i: int) -> bool:
    """Whether the kernel can update a parameter."""
    first, second, _, low = states.row(i)
    stored = isinstance(first, (Int8State, ExpandedFP8State))
    if not stored or not isinstance(gradient, jax.Array) or first[0].shape != second[0].shape:
        return False
    needed = jnp.float32 if low is None else jnp.bfloat16
    return (
        dtype_of(weight) == needed
        and weight.size > 0
        and weight.shape[-1] % GROUP == 0
        and gradient.dtype.itemsize <= 4
    )


def _decays(mask: Any, tree: Parameters) -> list[bool]:
    """Whether each parameter decays."""
    if mask is None:
        return [True] * len(tree.leaves)
    values = tree.tree([jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.float32) for leaf in tree.leaves])
    given = mask(values) if callable(mask) else mask
    return jax.tree.leaves(jax.tree.broadcast(given, values))


def _check(moments: Any, master: Any, **constants: Any) -> None:
    """Raise ValueError unless the kernel can do it."""

    def known(format: Any) -> bool:
        stored = isinstance(format, (Int8, ExpandedFP8)) and format.group == GROUP
        return stored and getattr(format, "companding", True)

    if isinstance(moments, PerParameter):
        takes = all(isinstance(each, Float32) or known(each) for each in moments.formats)
    else:
        takes = known(moments)
    if not takes:
        raise ValueError(
            f"moments={moments!r}: the kernel takes Int8() or ExpandedFP8(), with group={GROUP}. "
            "Use adamw(mu=..., nu=...) for other formats."
        )
    if master is not None and not isinstance(master, BFloat16Plus):
        raise ValueError(
            f"master={master!r}: the kernel takes BFloat16Plus(bits=8), BFloat16Plus(bits=16) or "
            "None. Use with_master_weights(adamw(...), master=...) for other master weights."
        )
    for name, value in constants.items():
        if not isinstance(value, (int, float)):
            raise ValueError(
                f"{name}={value!r} must be a Python number, because it is a constant of the "
                "kernel. Use adamw for hyperparameters that change."
            )
