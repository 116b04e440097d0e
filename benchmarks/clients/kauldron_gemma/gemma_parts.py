"""What the configs of Kauldron beside this file call: a small Gemma 2, its tokens, a train step."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from gemma import gm
from gemma.gm.nn import _config, _modules, _transformer
from kauldron import kd
from kauldron.train import train_step

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION

VOCABULARY, LENGTH = 512, 64
CONFIG = _config.TransformerConfig(
    num_embed=VOCABULARY, embed_dim=256, hidden_dim=512, num_heads=4, head_dim=64, num_kv_heads=2,
    final_logit_softcap=30.0, attn_logits_soft_cap=50.0, sliding_window_size=32,
    attention_types=(_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL),
    use_post_attn_norm=True, use_post_ffw_norm=True, transpose_gating_einsum=True,
)  # fmt: skip


class SmallGemma(_transformer.Transformer):
    """gemma's model, with the sizes above."""

    config: _config.TransformerConfig = CONFIG


class CrossEntropy(kd.losses.SoftmaxCrossEntropyWithIntLabels):
    """Kauldron's loss, of float32 logits. Of bfloat16 ones it prints two digits."""

    def get_values(self, logits, labels):
        return super().get_values(logits.astype(jnp.float32), labels)


def random_tokens() -> dict[str, np.ndarray]:
    """Sequences whose next token is the last one plus 1 to 8, so that there is something to learn.

    There are 7 batches of 4.
    """
    steps = np.random.default_rng(0).integers(1, 9, (28, LENGTH + 1))
    tokens = np.cumsum(steps, axis=1, dtype=np.int32) % VOCABULARY
    return {"input": tokens[:, :-1], "target": tokens[:, 1:, None]}


def model(recipe: str = "bfloat16", lora: int = 0, order: str = "convert last") -> nn.Module:
    """The model: in FP8, with adapters of rank `lora`, or both in this order."""
    made = SmallGemma(tokens="batch.input")
    if order == "convert first":
        made = in_fp8(made, recipe)
    if lora:
        made = gm.nn.LoRA(rank=lora, model=made)
    return in_fp8(made, recipe) if order == "convert last" else made


def in_fp8(model: nn.Module, recipe: str) -> nn.Module:
    if recipe == "bfloat16":
        return model
    if recipe == "qwix":
        import qwix

        # It has no einsum of three operands, as adapters have it.
        rule = qwix.QtRule(
            module_path="(?!.*lora).*", weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn",
            bwd_qtype="float8_e5m2",
        )  # fmt: skip
        return qwix.quantize_model(model, qwix.QtProvider([rule]))
    tokens = jnp.ones((4, LENGTH), jnp.int32)
    converted, coverage = fp8.convert(model, fp8.recipes.parse(recipe), inputs=(tokens,))
    print(coverage)
    return converted


class TrainStep(kd.train.TrainStep):
    """Kauldron's step for recipes with state: its own keeps what `apply` returns, an old state."""

    def _step(self, state, batch):
        if COLLECTION not in state.collections:
            return super()._step(state, batch)
        context = kd.train.Context.from_state_and_batch(state=state, batch=batch)
        others = dict(context.collections)

        def loss_fn(params, fp8_state):
            collections = {**others, COLLECTION: fp8_state}
            return train_step.forward_with_loss(
                context.replace(params=params, collections=collections),
                model=self.model, losses=self.aux.losses, is_training=True,
                rngs=self.rng_streams.train_rngs(state.step),
            )  # fmt: skip

        (_, after), grads, fp8_state = fp8.value_and_grad(loss_fn, has_aux=True)(
            state.params, others.pop(COLLECTION)
        )
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        following = state.replace(
            step=state.step + 1, opt_state=opt_state,
            params=optax.apply_updates(state.params, updates),
            collections={**after.collections, COLLECTION: fp8_state},
        )  # fmt: skip
        after = after.replace(grads=grads, updates=updates, opt_state=state.opt_state)
        return following, self.aux.update_context(after)
