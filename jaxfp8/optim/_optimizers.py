"""Adam, AdamW and Muon of optax with moments in few bytes."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

from jaxfp8._typing import ArrayLike, PyTree
from jaxfp8.optim._eight_bit_formats import Int8
from jaxfp8.optim._moment_formats import AbstractMomentFormat, PerParameter
from jaxfp8.optim._moments import with_moment_formats

_INT8 = Int8()
_LINEAR = Int8(companding=False)


def scale_by_adam(
    *,
    mu: AbstractMomentFormat | PerParameter = _INT8,
    nu: AbstractMomentFormat | PerParameter = _INT8,
    seed: int = 0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with stored moments.

    Args:
      **options: those of `optax.scale_by_adam`.
      mu: the format of the first moment.
      nu: the format of the second moment.
      seed: of stochastic rounding.

    Raises:
      ValueError: if `nu` cannot store a second moment, or `mu_dtype` is given.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_adam(b2=0.95)
      >>> tx.init({"w": jnp.ones((64, 64))}).inner.mu["w"].roots.dtype.name
      'int8'
    """
    if options.get("mu_dtype") is not None:
        raise ValueError(
            f"mu_dtype={options['mu_dtype']!r} contradicts mu={mu!r}, which says how the first "
            "moment is stored. Leave mu_dtype out, or use mu=BFloat16()."
        )
    tx = optax.scale_by_adam(**options)
    return with_moment_formats(tx, {"mu": mu, "nu": nu}, seed=seed)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    weight_decay: ArrayLike = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    nesterov: bool = False,
    mu: AbstractMomentFormat | PerParameter = _INT8,
    nu: AbstractMomentFormat | PerParameter = _INT8,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` with stored moments.

    | source | `mu=` | `nu=` | bytes a parameter |
    |---|---|---|---|
    | FP8-LM | `FP8()` | `Float16()` | 3 |
    | COAT | `ExpandedFP8()` | `ExpandedFP8()` | 2.13 |
    | FlashOptim, the default | `Int8()` | `Int8()` | 2.06 |
    | float32 | `Float32()` | `Float32()` | 8 |

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      eps_root: added to the second moment.
      weight_decay: times the learning rate.
      mask: which parameters decay, as in `optax.adamw`.
      nesterov: whether to use Nesterov momentum.
      mu: the format of the first moment.
      nu: the format of the second moment.
      seed: of stochastic rounding.

    Raises:
      ValueError: if `nu` cannot store a second moment.

    References:
      Loshchilov and Hutter, arXiv:1711.05101; FP8-LM, arXiv:2310.18313; COAT, arXiv:2410.19313;
      FlashOptim, arXiv:2602.23349.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxfp8.optim import BFloat16Plus, with_master_weights
      >>> tx = with_master_weights(adamw(1e-3), master=BFloat16Plus(bits=8))
      >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> optax.apply_updates(params, updates)["w"].dtype.name
      'bfloat16'
    """
    tx = optax.adamw(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        mask=mask,
        nesterov=nesterov,
    )
    return with_moment_formats(tx, {"mu": mu, "nu": nu}, seed=seed)


def scale_by_muon(
    *, mu: AbstractMomentFormat | PerParameter = _LINEAR, seed: int = 0, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.scale_by_muon` with stored momentum, for matrices.

    For a model with other arrays write `with_moment_formats(optax.contrib.muon(...), {"mu": ...,
    "nu": ...})`, which also stores the moments of Adam for these arrays.

    Args:
      **options: those of `optax.contrib.scale_by_muon`. Without `weight_dimension_numbers` each
        array must be a matrix.
      mu: the format of the momentum.
      seed: of stochastic rounding.

    Raises:
      ValueError: by `update`, for an array that is no matrix.

    References:
      Jordan, Muon; 8-bit Muon, arXiv:2509.23106.

    Example:
      >>> import jax.numpy as jnp
      >>> scale_by_muon().init({"w": jnp.ones((64, 64))}).inner.mu["w"].codes.dtype.name
      'int8'
    """
    options.setdefault("weight_dimension_numbers", _matrices)
    return with_moment_formats(optax.contrib.scale_by_muon(**options), {"mu": mu}, seed=seed)


def _matrices(updates: PyTree) -> PyTree:
    """The dimension numbers of matrices. optax fails on its own default with trees."""
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        if update.ndim != 2:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has shape {list(update.shape)}, which is no matrix. "
                "Pass weight_dimension_numbers=, a tree with optax.contrib.MuonDimensionNumbers "
                "for each array. It is MuonDimensionNumbers(-2, -1) for matrices that are stacked "
                "along leading axes, such as those of experts."
            )
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), updates)
