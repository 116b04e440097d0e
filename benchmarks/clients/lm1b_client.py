"""flax's example lm1b, by its own `main.py`: a linen model that each step makes anew.

Its data set is that of `lm1b_data.py`. Each row trains, evaluates and samples text with a cache in
each of 6 steps, and saves a checkpoint.
"""

import functools

from _client import RECIPES, Client, Row, beside, documented

SIZES = (
    "num_layers=2 emb_dim=256 qkv_dim=256 mlp_dim=512 num_heads=4 vocab_size=256 "
    "max_corpus_chars=100000 per_device_batch_size=4 eval_per_device_batch_size=4 "
    "max_target_length=128 max_eval_target_length=128 max_predict_length=32 num_train_steps=6 "
    "num_eval_steps=2 eval_every_steps=1 warmup_steps=2"
)
PACKAGES = (
    "flax==0.12.12",
    "jax==0.12.0.1",
    "optax==0.2.8",
    "qwix==0.1.8",
    "clu==0.0.12",
    "grain==0.2.18",
    "importlib_resources==7.1.0",  # tensorflow-datasets reads its configs with it
    "jaxtyping==0.3.11",
    "ml_collections==1.1.0",
    "orbax-checkpoint==0.12.8",
    "sentencepiece==0.2.3",
    "tensorboard==2.21.0",
    "tensorflow==2.21.0",
    "tensorflow-datasets==4.9.10",
    "tensorflow-text==2.21.1",
)
PATCHES = (
    functools.partial(documented, "flax-examples.md", "lm1b patch"),
    functools.partial(documented, "flax-examples.md", "gemma example patch"),
    functools.partial(beside, "flax_repeatable.patch"),
    functools.partial(beside, "flax_qwix.patch"),
)
FOUR = ("--config.per_device_batch_size=1", "--config.eval_per_device_batch_size=1")
DEVICES = "4 devices, FSDP"
RESUMED = "resumed after step 4"
WRITTEN = ("--config.num_train_steps=4",)


def rows(name, recipes, **options):
    """A row for each recipe. Those of setup and those of the row have the same arguments."""
    fixed = options.pop("arguments", ())
    for recipe in recipes:
        fp8 = (f"--config.fp8={recipe}",) if recipe in RECIPES else ()
        qwix = {"QWIX": "1"} if recipe == "qwix" else {}
        before = tuple((*fixed, *each, *fp8) for each in options.get("setup", ()))
        given = options | {"arguments": (*fixed, *fp8), "environment": qwix, "setup": before}
        yield Row(name=name, recipe=recipe, **given)


def example(name: str, form: str, config: str, sizes: str, **fields) -> Client:
    """An example of flax, which reads lm1b in a file format, with sizes in a config of its own."""
    folder = f"{{checkout}}/examples/{name.removesuffix('_example')}"
    return Client(
        name=name,
        python="3.12",
        packages=PACKAGES,
        checkout="google/flax 18f8f31",
        patches=PATCHES,
        command=(
            "{here}/lm1b_data.py",
            form,
            f"{folder}/main.py",
            "--workdir={scratch}/work",
            f"--config={folder}/configs/{config}.py",
            *(f"--config.{size}" for size in sizes.split()),
        ),
        environment={"TFDS_DATA_DIR": "{checkout}/tfds", "TF_CPP_MIN_LOG_LEVEL": "3"},
        losses=6,
        **fields,
    )


CLIENT = example(
    "lm1b",
    "tfrecord",
    "default",
    SIZES,
    title="lm1b of flax 18f8f31 (2 layers of 256)",
    loss=r"train_loss=([\d.]+)",
    program="jit_train_step",
    rows=(
        *rows("train, evaluate, decode", ("bfloat16", "qwix", *RECIPES)),
        *rows(DEVICES, ("bfloat16", "delayed", "blockwise"), arguments=FOUR, devices=4),
        *rows(RESUMED, ("bfloat16", "delayed", "blockwise"), setup=(WRITTEN,), losses=2),
    ),
    lines={"jaxfp8": "8, with state 12", "own FP8": "none", "qwix": "5"},
)
