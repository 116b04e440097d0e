"""The check of what a matmul is differentiated with respect to."""

from typing import Any

import jax

from jaxfp8._typing import FP8StateError, UncollectedStateError
from jaxfp8.ops._call import Call


def check_differentiated(call: Call, primals: Any) -> None:
    """Check what a matmul is differentiated with respect to.

    Args:
      call: the static part of the call.
      primals: `Arrays`. Each leaf has a `value`, and `perturbed`: whether it is differentiated.

    Raises:
      UncollectedStateError: if a matmul with state is differentiated without its state.
      FP8StateError: if the FP8 values of a weight are differentiated.
    """
    own = primals.quantizers
    if any(leaf.perturbed for leaf in jax.tree.leaves(primals.held, is_leaf=_is_primal)):
        raise FP8StateError(
            "an FP8 weight is being differentiated, but its values have no gradient. Use "
            "fp8.value_and_grad(loss)(params, state, ...) in place of jax.value_and_grad, with "
            "state=() for recipes without state (nnx: fp8.nnx.value_and_grad). It gives the "
            "gradient of the weight in high precision."
        )
    # The gradient of a bias alone reads no FP8 tensor, so it needs no state.
    matmul = [primals.x, primals.w, *([] if own.known is None else [own.known])]
    differentiated = any(each.perturbed for each in matmul)
    if call.collected and differentiated and (own.ledger is None or not own.ledger.perturbed):
        if call.in_gradient_channel:
            raise UncollectedStateError(
                'a matmul with state_channel="gradient" is being differentiated, but not with '
                "respect to its state, so the next state would be lost. Differentiate all "
                "variables, also those of the state: jax.value_and_grad(loss)(variables), and "
                "without stop_gradient. In nnx write argnums=nnx.DiffState(0, nnx.Any(nnx.Param, "
                "fp8.nnx.FP8State)). If this loss does not train the network, use "
                "jax.lax.stop_gradient(fp8.freeze(state))."
            )
        raise UncollectedStateError(
            "a matmul with quantizer state is being differentiated, but its state is not "
            "collected. Use fp8.value_and_grad in place of jax.value_and_grad (nnx: "
            "fp8.nnx.value_and_grad). Pass the state that it gives to the loss on to the layers, "
            "without stop_gradient. If this loss does not train the network, use "
            "fp8.freeze(state) or fp8.nnx.freeze(model)."
        )


def _is_primal(node: object) -> bool:
    return isinstance(node, jax.custom_derivatives.CustomVJPPrimal)
