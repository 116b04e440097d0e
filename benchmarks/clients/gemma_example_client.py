"""flax's example gemma, by its own `main.py`: an nnx model, whose sampler has a cache.

Its data set is that of `lm1b_data.py`. Each row trains for 6 steps, samples text, evaluates, and
saves a checkpoint. A loss that it prints is the mean of all steps so far.
"""

from _client import RECIPES, Client
from lm1b_client import PACKAGES, PATCHES, rows

SIZES = (
    "transformer_params.num_layers=2 vocab_size=256 max_corpus_chars=100000 "
    "per_device_batch_size=4 eval_per_device_batch_size=4 max_target_length=128 "
    "max_eval_target_length=128 num_train_steps=6 num_predict_steps=10 num_eval_steps=2 "
    "warmup_steps=2 prefetch_num_workers=0"
)
NNX = ("--config.use_nnx_transforms=all",)
FOUR = (*NNX, "--config.per_device_batch_size=1", "--config.eval_per_device_batch_size=1")
RESUMED = "nnx transforms, resumed after step 4"
WRITTEN = ("--config.num_train_steps=4",)


CLIENT = Client(
    name="gemma_example",
    title="gemma of flax 18f8f31 (2 layers of 256)",
    python="3.12",
    packages=PACKAGES,
    checkout="google/flax 18f8f31",
    patches=PATCHES,
    command=(
        "{here}/lm1b_data.py",
        "array_record",
        "{checkout}/examples/gemma/main.py",
        "--workdir={scratch}/work",
        "--config={checkout}/examples/gemma/configs/tiny.py",
        *(f"--config.{size}" for size in SIZES.split()),
    ),
    environment={"TFDS_DATA_DIR": "{checkout}/tfds", "TF_CPP_MIN_LOG_LEVEL": "3"},
    loss=r"Loss: ([\d.]+)",
    losses=6,
    program="jit__unnamed_function",
    rows=(
        *rows("nnx transforms", ("bfloat16", *RECIPES), arguments=NNX),
        *rows("nnx transforms", ("qwix",), arguments=NNX, refuses="ShardingTypeError"),
        *rows("jax transforms", ("bfloat16", "current", "blockwise")),
        *rows("jax transforms", ("delayed",), refuses="UncollectedStateError"),
        *rows(
            "nnx transforms, 4 devices, FSDP",
            ("bfloat16", "delayed", "blockwise"),
            arguments=FOUR,
            devices=4,
        ),
        *rows(RESUMED, ("bfloat16", "delayed"), arguments=NNX, setup=(WRITTEN,), losses=2),
    ),
    lines={"jaxfp8": "4, with state 6", "own FP8": "none", "qwix": "6"},
)
