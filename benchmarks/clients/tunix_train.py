"""Trains a small Qwen3 by Tunix's own trainers: all weights, adapters by qwix, or GRPO.

    python tunix_train.py full --fp8 current
    python tunix_train.py lora --fp8 blockwise --weights fp8
    python tunix_train.py grpo --fp8 current

It is written as a user of Tunix writes it. The lines with `fp8.` are those of jaxfp8. Tokens are
random walks, so that a model learns something in few steps. It prints the loss of each step.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.sft import hooks, peft_trainer
from tunix.sft import utils as sft_utils

import jaxfp8 as fp8

VOCABULARY, LENGTH, BATCH = 512, 64, 8
ADAPTED = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*up_proj|.*down_proj"


# The model.


def make_model(mesh, experts=0, dtype=jnp.float32):
    """Qwen3 with 2 layers of width 256, sharded as its own annotations say."""
    mixture = {"num_experts": experts, "num_experts_per_tok": 2} if experts else {}
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=VOCABULARY, embed_dim=256, hidden_dim=512, num_heads=4,
        head_dim=64, num_kv_heads=2, norm_eps=1e-6, rope_theta=10_000, use_tied_embedding=True,
        dtype=jnp.bfloat16, param_dtype=dtype, **mixture,
    )  # fmt: skip

    @nnx.jit
    def init():
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model, nnx.Param)
        keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(state))))

        def drawn(leaf):  # Tunix's kernels are zeros until a checkpoint is loaded
            key = next(keys)
            if leaf.ndim < 2:
                return jnp.ones_like(leaf)
            return (jax.random.normal(key, leaf.shape) * leaf.shape[-1] ** -0.5).astype(leaf.dtype)

        state = jax.tree.map(drawn, state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    with jax.set_mesh(mesh):
        return init()


def adapted(model, inputs):
    """The model with adapters of rank 8 beside each weight."""
    provider = qwix.LoraProvider(module_path=ADAPTED, rank=8, alpha=8.0)
    return qwix.apply_lora_to_model(model, provider, *inputs, rngs=nnx.Rngs(3))


def in_fp8(model, recipe, inputs):
    """The model with FP8 matmuls: by jaxfp8, or by qwix's own FP8."""
    if recipe == "bfloat16":
        return model
    if recipe == "qwix":
        e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
        rule = qwix.QtRule(module_path=ADAPTED, weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2)
        return qwix.quantize_model(model, qwix.QtProvider([rule]), *inputs)
    model, coverage = fp8.convert(model, getattr(fp8.recipes, recipe)(), inputs=inputs)
    print(coverage)
    return model


def frozen_in_fp8(model, recipe):
    """The model with a byte for each frozen weight. The adapters stay as they are."""
    axes = fp8.weights.WeightAxes
    rules = [
        (".*/(q|k|v)_proj/w", axes()),  # the matmul contracts the first axis
        (".*/o_proj/w", axes(contracted=(0, 1))),
        (".*/(gate|up|down)_proj/kernel", axes()),
    ]
    return fp8.quantize_params(
        model, getattr(fp8.recipes, recipe)(), rules=rules, state=model, primary=True
    )


class FP8Trainer(peft_trainer.PeftTrainer):
    """`PeftTrainer` for recipes with state: `fp8.nnx.value_and_grad` updates them."""

    def _train_step(self, model, optimizer, inputs):
        run = fp8.nnx.value_and_grad(self.loss_fn, has_aux=self._has_aux, wrt=optimizer.wrt)
        out, grads = run(model, **self.gen_model_input_fn(inputs))
        optimizer.update(model, grads)
        return *(out if self._has_aux else (out, None)), optax.global_norm(grads)


# Training.


class PrintLoss(hooks.TrainingHooks):
    def on_train_step_end(self, trainer, step, loss):
        print(f"step {step} loss {loss:.9g}", flush=True)

    def nothing(self, *_):
        pass

    on_train_start = on_train_end = on_train_step_start = nothing
    on_eval_step_start = on_eval_step_end = nothing


def batches():
    random = np.random.default_rng(0)
    while True:
        tokens = np.cumsum(random.integers(0, 4, (BATCH, LENGTH)), axis=1) % VOCABULARY
        yield peft_trainer.TrainingInput(
            input_tokens=tokens.astype(np.int32), input_mask=np.ones(tokens.shape, bool)
        )


def model_input(batch):
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": sft_utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": sft_utils.make_causal_attn_mask(batch.input_mask),
    }


def example():
    """Positional arguments of a call of the model."""
    given = model_input(next(batches()))
    return given["input_tokens"], given["positions"], None, given["attention_mask"]


def supervised(model, given):
    """Fine-tuning of all weights, or of the adapters if there are any."""
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000, max_steps=given.steps,
        checkpoint_root_directory=given.checkpoints,
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1),
    )  # fmt: skip
    kind = FP8Trainer if given.trainer == "fp8" else peft_trainer.PeftTrainer
    trainer = kind(model, optax.adamw(given.rate), config)
    trainer = trainer.with_gen_model_input_fn(model_input)
    trainer.with_training_hooks(PrintLoss())
    wrt = trainer.optimizer.wrt
    print(f"trained parameters: {count(nnx.state(model, wrt))} of {count(nnx.state(model))}")
    print(f"bytes of the model: {size(nnx.state(model))}")
    trainer.train(batches())


def count(state):
    return sum(leaf.size for leaf in jax.tree.leaves(state))


def size(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text):
        return [3 + ord(letter) % (VOCABULARY - 3) for letter in text]

    def decode(self, ids):
        return " ".join(str(int(each)) for each in ids)

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2


def even(prompts, completions, **_):
    """The reward: how many tokens of a completion are even."""
    shares = [np.mean([int(x) % 2 == 0 for x in text.split()] or [0]) for text in completions]
    print(f"reward {np.mean(shares):.9g}", flush=True)
    return [float(share) for share in shares]


def reinforced(actor, reference, mesh, given):
    """GRPO: the vanilla rollout samples from the actor's own weights."""
    Role = rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        rollout_engine="vanilla",
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(given.rate), eval_every_n_steps=1000,
            max_steps=given.steps, mini_batch_size=4, train_micro_batch_size=4,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=16, max_prompt_length=16, kv_cache_size=64, temperature=1.0,
            top_p=1.0, seed=5,
        ),
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(
        actor=actor, reference=reference, tokenizer=Letters(), cluster_config=config
    )
    cluster.actor_trainer.with_training_hooks(PrintLoss())
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster, reward_fns=even,
        algo_config=grpo_learner.GRPOConfig(num_generations=4, beta=0.04),
    )  # fmt: skip
    prompts = np.array([f"count {i}" for i in range(4 * given.steps)]).reshape(given.steps, 4)
    learner.train({"prompts": each} for each in prompts)
    trained = jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param))
    sampled = jax.tree.leaves(nnx.state(cluster.rollout.model(), nnx.Param))
    if not all(map(np.array_equal, trained, sampled)):
        sys.exit("the rollout has other weights than the actor")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("full", "lora", "grpo"))
    parser.add_argument("--fp8", default="bfloat16", help="a recipe of jaxfp8, qwix, or bfloat16")
    parser.add_argument("--order", default="adapters-first", help="or convert-first")
    parser.add_argument("--weights", default="bfloat16", help="fp8: frozen weights in FP8")
    parser.add_argument("--trainer", default="tunix", help="fp8: for recipes with state")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--checkpoints", help="a folder, from which a run goes on")
    given = parser.parse_args()
    split = 2 if jax.device_count() > 1 else 1
    mesh = jax.make_mesh(
        (jax.device_count() // split, split), ("fsdp", "tp"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )  # fmt: skip
    # What is frozen is kept in bfloat16.
    dtype = jnp.bfloat16 if given.task == "lora" else jnp.float32
    model, inputs = make_model(mesh, given.experts, dtype), example()
    with jax.set_mesh(mesh):
        steps = [lambda model: in_fp8(model, given.fp8, inputs)]
        if given.task == "lora":
            place = 1 if given.order == "convert-first" else 0
            steps.insert(place, lambda model: adapted(model, inputs))
        trained = model
        for step in steps:
            trained = step(trained)
        if given.weights == "fp8":
            trained = frozen_in_fp8(trained, given.fp8)
        if given.task == "grpo":
            reinforced(trained, make_model(mesh, given.experts), mesh, given)
        else:
            supervised(trained, given)


if __name__ == "__main__":
    main()
