"""flax's example gemma, by its own `main.py`: an nnx model, whose sampler has a cache.

Its data set is that of `lm1b_data.py`. Each row trains for 6 steps, samples text, evaluates, and
saves a checkpoint. A loss that it prints is the mean of all steps so far.
"""

import functools

from _client import RECIPES, Client, Row, beside, documented

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


def rows(name, recipes, **options):
    fixed = options.pop("arguments", ())
    for recipe in recipes:
        fp8 = (f"--config.fp8={recipe}",) if recipe in RECIPES else ()
        qwix = {"QWIX": "1"} if recipe == "qwix" else {}
        before = tuple((*fixed, *each, *fp8) for each in options.get("setup", ()))
        given = options | {"arguments": (*fixed, *fp8), "environment": qwix, "setup": before}
        yield Row(name=name, recipe=recipe, **given)


CLIENT = Client(
    name="gemma_example",
    title="gemma of flax 18f8f31 (2 layers of 256)",
    python="3.12",
    packages=(
        "flax==0.12.12",
        "jax==0.12.0.1",
        "optax==0.2.8",
        "qwix==0.1.8",
        "clu==0.0.12",
        "grain==0.2.18",
        "jaxtyping==0.3.11",
        "ml_collections==1.1.0",
        "orbax-checkpoint==0.12.8",
        "sentencepiece==0.2.3",
        "tensorboard",
        "tensorflow==2.21.0",
        "tensorflow-datasets==4.9.10",
    ),
    checkout="google/flax 18f8f31",
    patches=(
        functools.partial(documented, "lm1b patch"),
        functools.partial(documented, "gemma example patch"),
        functools.partial(beside, "flax_repeatable.patch"),
        functools.partial(beside, "flax_qwix.patch"),
    ),
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
    program="jit_.*train_step.*",
    rows=(
        *rows("nnx transforms", ("bfloat16", "qwix", *RECIPES), arguments=NNX),
        *rows("jax transforms", ("bfloat16", "current", "blockwise")),
        *rows("jax transforms", ("delayed",), refuses="FP8StateError"),
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
