"""flax's example gemma, by its own `main.py`: an nnx model, whose sampler has a cache.

Its data set is that of `lm1b_data.py`. Each row trains for 6 steps, samples text, evaluates, and
saves a checkpoint. A loss that it prints is the mean of all steps so far.
"""

from _client import RECIPES
from lm1b_client import example, rows

SIZES = (
    "transformer_params.num_layers=2 vocab_size=256 max_corpus_chars=100000 "
    "per_device_batch_size=4 eval_per_device_batch_size=4 max_target_length=128 "
    "max_eval_target_length=128 num_train_steps=6 num_predict_steps=10 num_eval_steps=2 "
    "warmup_steps=2 prefetch_num_workers=0"
)
NNX = ("--config.use_nnx_transforms=all",)
FOUR = (*NNX, "--config.per_device_batch_size=1", "--config.eval_per_device_batch_size=1")
FSDP = "nnx transforms, 4 devices, FSDP"
RESUMED = "nnx transforms, resumed after step 4"
WRITTEN = ("--config.num_train_steps=4",)


CLIENT = example(
    "gemma_example",
    "array_record",
    "tiny",
    SIZES,
    title="gemma of flax 18f8f31 (2 layers of 256)",
    loss=r"Loss: ([\d.]+)",
    program="jit_(_unnamed_function|jax_train_step)",  # of nnx.jit, or of jax.jit
    rows=(
        *rows("nnx transforms", ("bfloat16", *RECIPES), arguments=NNX),
        *rows("nnx transforms", ("qwix",), arguments=NNX, refuses="ShardingTypeError"),
        *rows("jax transforms", ("bfloat16", "current", "blockwise")),
        *rows("jax transforms", ("delayed",), refuses="UncollectedStateError"),
        *rows(FSDP, ("bfloat16", "delayed"), arguments=FOUR, devices=4),
        *rows(FSDP, ("blockwise",), arguments=FOUR, devices=4, refuses="cuts tiles of 128"),
        *rows(RESUMED, ("bfloat16", "delayed"), arguments=NNX, setup=(WRITTEN,), losses=2),
    ),
    lines={"jaxfp8": "4, with state 6", "own FP8": "none", "qwix": "6"},
)
