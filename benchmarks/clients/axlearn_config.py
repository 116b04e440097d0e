"""A config for axlearn's own command: a causal language model of 2 layers of 256, and fake tokens.

    python -m axlearn.common.launch_trainer_main --module=axlearn_config --config=NAME ...

NAME is bfloat16, its_fp8, or a text for `fp8.recipes.parse`.
"""

import functools

import jax.numpy as jnp
from axlearn.common.attention import RepeatedTransformerLayer
from axlearn.common.config import config_for_function
from axlearn.common.input_fake import FakeLmInput
from axlearn.common.layers import RMSNorm
from axlearn.common.quantized_dot_general.layers import set_quantized_dot_general_recursively
from axlearn.common.trainer import SpmdTrainer
from axlearn.common.trainer_config_modifier import FP8ConfigModifier
from axlearn.common.update_transformation import OverrideInplaceUpdateTransformation
from axlearn.experiments.text.gpt.common import adamw_decoupled_learner_config, model_config

import jaxfp8 as fp8
from jaxfp8.plugs import axlearn as fp8_axlearn

STEPS = 6


def trainer_config(name: str) -> SpmdTrainer.Config:
    model = model_config(
        hidden_dim=256, num_heads=4, num_layers=2, vocab_size=512, activation_fn="nn.relu",
        ffn_dim=512, normalization=RMSNorm.default_config(),
        stack_cfg=RepeatedTransformerLayer.default_config(), pad_token_id=0,
    )  # fmt: skip
    learner = adamw_decoupled_learner_config(
        peak_lr=0.003, max_step=1000, weight_decay=0.0, lr_warmup_steps=1
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer", model=model, learner=learner, max_step=STEPS, train_dtype=jnp.bfloat16,
        mesh_axis_names=("data", "expert", "fsdp", "seq", "model"), mesh_shape=(1, 1, -1, 1, 1),
        batch_axis_names=("data", "expert", "fsdp", "seq"), log_every_n_steps=1,
        input=FakeLmInput.default_config().set(
            is_training=True, global_batch_size=8, source_length=128, max_token_id=64
        ),
    )  # fmt: skip
    cfg.checkpointer.save_policy = config_for_function(every).set(steps=3)
    if name == "its_fp8":
        return FP8ConfigModifier.default_config().set(fp8_amax_history_length=16).instantiate()(cfg)
    if name != "bfloat16":
        quantize(cfg, fp8.recipes.parse(name))
    return cfg


def quantize(cfg: SpmdTrainer.Config, recipe: fp8.Recipe) -> None:
    """What a user writes."""
    set_quantized_dot_general_recursively(cfg.model, fp8_axlearn.quantized_einsum_config(recipe))
    cfg.learner.optimizer = OverrideInplaceUpdateTransformation.default_config().set(
        transformation=cfg.learner.optimizer, rules=fp8_axlearn.UPDATE_RULES
    )


def every(*, steps: int):
    """A policy for checkpoints: after so many steps."""
    return lambda *, step, evaler_summaries: step % steps == 0


def named_trainer_configs():
    """axlearn calls it, and what it returns with the name of a config."""
    return lambda name: functools.partial(trainer_config, name)
