"""levanter: `levanter.main.train_lm` with a small Llama and a small Qwen3 with experts.

Rows in bfloat16 and with haliax's own FP8 run levanter's command. The others run the same command
by `python -m jaxfp8.plugs.levanter`, with another `model.type`.
"""

from _client import Client, Row

TRAIN, EXPORT = "levanter.main.train_lm", "levanter.main.export_lm_to_hf"
SIZES = (
    "max_seq_len=128 hidden_dim=256 intermediate_dim=512 num_layers=2 num_heads=4 num_kv_heads=4 "
    "reference_checkpoint={scratch}/run"
)
FILES = ("{here}/levanter_files.py", "{scratch}/run")
CONFIG = ("--config_path", "{scratch}/run/levanter.yaml")
THREE = ("delayed", "current", "blockwise")
EXPERTS = (
    "--model.num_experts_per_tok", "2", "--model.num_experts", "4",
    "--model.moe_intermediate_dim", "256", "--model.head_dim", "64",
)  # fmt: skip
EXPORTED = "read from an exported file"
ITS_OWN = {
    "bfloat16": (),
    "its fp8": ("--trainer.quantization.fp8", "true"),
    "its int8": ("--trainer.quantization.int8", "true"),
}


def train(recipe: str, *arguments: str, model: str = "llama") -> tuple[str, ...]:
    """The command of one run, behind `python`."""
    if recipe in ITS_OWN:
        chosen = ("--model.type", model, *ITS_OWN[recipe])
        return ("-m", TRAIN, *CONFIG, *chosen, *arguments)
    chosen = ("--model.type", f"jaxfp8_{model}", "--model.recipe", recipe)
    return ("-m", "jaxfp8.plugs.levanter", TRAIN, *CONFIG, *chosen, *arguments)


def row(name: str, recipe: str, *arguments: str, model: str = "llama", **fields) -> Row:
    setup = (FILES, *fields.pop("setup", ()))
    return Row(
        name=name, recipe=recipe, arguments=train(recipe, *arguments, model=model),
        setup=setup, **fields,
    )  # fmt: skip


def resumed(recipe: str) -> Row:
    """4 steps, their checkpoint, and 4 steps more, which must be those of a run of 8."""
    first = train(recipe, "--trainer.num_train_steps", "4")
    return row("resumed", recipe, setup=(first,), like=("1 device", recipe), losses=5)


def read_back(name: str, exporter: str, **fields) -> Row:
    """4 steps, a file for Hugging Face of them, and 8 steps of a model that reads this file."""
    model = ("--model.type", "llama")
    command = ("-m", EXPORT)
    if exporter == "jaxfp8":
        model = ("--model.type", "jaxfp8_llama", "--model.recipe", "delayed")
        command = ("-m", "jaxfp8.plugs.levanter", EXPORT)
    sizes = (f"--model.{size}" for size in SIZES.split())
    written = (
        *command, "--checkpoint_path", "{scratch}/run/checkpoints/run", "--output_dir",
        "{scratch}/run/hf", "--tokenizer", "{scratch}/run", *model, *sizes,
        "--trainer.require_accelerator=false",
    )  # fmt: skip
    return row(
        name, "delayed", "--initialize_from_hf", "{scratch}/run/hf",
        "--trainer.checkpointer.base_path", "{scratch}/run/second",
        setup=(train("delayed", "--trainer.num_train_steps", "4"), written), **fields,
    )  # fmt: skip


def microbatches(recipe: str, **fields) -> Row:
    return row("microbatches of 4", recipe, "--trainer.per_device_parallelism", "4", **fields)


CLIENT = Client(
    name="levanter",
    title="levanter 0.2.20.dev202606180959",
    python="3.11",
    packages=(
        "jax[cpu]==0.10.2", "marin-levanter==0.2.20.dev202606180959",
        "marin-haliax==0.2.20.dev202606180959", "gitpython==3.2.1",
    ),
    command=(),
    environment={"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"},
    loss=r'"train/loss": ([\d.]+), "global_step": \d+, "run_progress": [\d.]+\}\}',
    losses=7,  # without the first two steps. levanter prints the last one twice
    program="jit_.*train_step.*",
    rows=(
        *(row("1 device", recipe) for recipe in ITS_OWN),
        *(row("1 device", recipe) for recipe in (*THREE, "rowwise", "mxfp8")),
        *(resumed(recipe) for recipe in THREE),
        read_back(EXPORTED, "jaxfp8"),
        read_back(f"{EXPORTED} by levanter alone", "levanter", like=(EXPORTED, "delayed")),
        *(row("4 devices", recipe, devices=4) for recipe in ("bfloat16", *THREE)),
        # The recipe identity() is a control: no FP8, and sums of experts in float32.
        *(
            row("Qwen3 with experts", recipe, *EXPERTS, model="qwen3_moe")
            for recipe in ("bfloat16", "its fp8", "identity", *THREE)
        ),
        # It logs traced losses by a callback inside of the loss, which jax cannot differentiate.
        row("Mixtral", "bfloat16", model="mixtral", refuses="IO callbacks do not support JVP"),
        microbatches("bfloat16"),
        microbatches("current"),
        microbatches("delayed", refuses="per_device_parallelism: -1, or take a recipe without"),
    ),
    lines={
        "jaxfp8": "2, and another module in the command: model.type and model.recipe",
        "its fp8": "1: trainer.quantization.fp8: true",
        "qwix": "none: flax only",
    },
)  # fmt: skip
