"""axlearn: its `launch_trainer_main` with a small language model, in bfloat16's `train_dtype`.

axlearn's own pins are of jax 0.8.3, below what jaxfp8 needs. So its packages are installed here
without it, with jax 0.10.2. axlearn itself is read from its source tree.
"""

from _client import Client, Row


def row(name: str, recipe: str, **fields) -> Row:
    config = {"its fp8": "its_fp8"}.get(recipe, recipe)
    return Row(name=name, recipe=recipe, arguments=(f"--config={config}",), **fields)


CLIENT = Client(
    name="axlearn",
    title="axlearn 34aed43c",
    python="3.12",
    packages=(
        "jax[cpu]==0.10.2", "attrs==26.1.0", "numpy==2.1.3", "absl-py==2.5.1", "chex==0.1.92",
        "etils[epy]==1.13.0", "ml-dtypes==0.6.0", "msgpack==1.2.4", "nltk==3.9.2",
        "optax==0.2.6", "portpicker==1.6.0", "protobuf==5.29.6", "tensorflow==2.19.1",
        "tensorflow-datasets==4.9.9", "tensorflow-metadata==1.17.3", "tensorflow-text==2.19.0",
        "tensorstore==0.1.86", "toml==0.10.2", "typing-extensions==4.16.0", "scipy==1.18.1",
        "seqio==0.0.20", "sentencepiece==0.2.0", "aqtp==0.9.0", "flax==0.12.8",
        "prefixed==0.9.0", "grain==0.2.18", "pydantic==2.14.4", "qwix==0.1.8", "jaxtyping==0.3.11",
        "fire==0.7.1",
    ),
    alone=("tokamax==0.0.15", "einshape==1.0", "xprof==2.24.2"),  # xprof wants another protobuf
    checkout="apple/axlearn 34aed43c",
    command=(
        "-m", "axlearn.common.launch_trainer_main", "--module=axlearn_config",
        "--trainer_dir={scratch}", "--jax_backend=cpu",
    ),
    environment={"PYTHONPATH": "{here}"},
    loss=r"loss=([\d.]+) aux",
    losses=6,
    program="jit.*train_step.*",
    rows=(
        *(row("1 device", recipe) for recipe in ("bfloat16", "delayed", "current", "blockwise")),
        row("1 device", "its fp8", refuses="Fp8 quantization is only available on H100 GPU"),
    ),
    lines={"jaxfp8": "4, with state 6", "its fp8": "2", "qwix": "none: flax only"},
)  # fmt: skip
