"""Tunix: its PeftTrainer with all weights and with LoRA by qwix, and its GRPO learner."""

from _client import Client, Row

FOUR = 4
"""Devices: FSDP over 2, tensor parallelism over 2."""
CHECKPOINTS = ("--checkpoints", "{scratch}/checkpoints")


def row(name: str, recipe: str, *arguments: str, **fields: object) -> Row:
    method = {"bfloat16": "bfloat16", "qwix fp8": "qwix"}.get(recipe, recipe)
    fields = {"devices": FOUR} | fields
    return Row(name=name, recipe=recipe, arguments=(*arguments, "--fp8", method), **fields)


def full() -> list[Row]:
    name = "all weights, FSDP 2 x TP 2"
    recipes = ("bfloat16", "current", "rowwise", "blockwise", "mxfp8", "qwix fp8")
    found = [row(name, each, "full") for each in recipes]
    found.append(row(name, "delayed", "full", "--trainer", "fp8"))
    found.append(
        row(
            f"{name}, PeftTrainer itself",
            "delayed",
            "full",
            refuses=r"UncollectedStateError: .*fp8\.nnx\.value_and_grad",
        )
    )
    return found


def experts() -> list[Row]:
    return [
        row("4 experts, FSDP 2 x TP 2", each, "full", "--experts", "4")
        for each in ("bfloat16", "current", "blockwise")
    ]


def resumed() -> list[Row]:
    """Two commands, of 3 steps and then of 6: the last 3 losses must be those of one run."""
    return [
        row(
            "all weights, resumed after step 3", each, "full", *extra, *CHECKPOINTS, losses=3,
            setup=(("full", *extra, *CHECKPOINTS, "--fp8", each, "--steps", "3"),),
            like=("all weights, FSDP 2 x TP 2", each),
        )
        for each, extra in (
            ("bfloat16", ()), ("blockwise", ()), ("delayed", ("--trainer", "fp8"))
        )
    ]  # fmt: skip


def adapters() -> list[Row]:
    name = "LoRA by qwix, FSDP 2 x TP 2"
    found = [row(name, each, "lora") for each in ("bfloat16", "current", "rowwise", "blockwise")]
    found.append(row(name, "delayed", "lora", "--trainer", "fp8"))
    found += [
        row(f"{name}, weights in FP8", each, "lora", "--weights", "fp8", like=(name, each))
        for each in ("current", "rowwise", "blockwise")
    ]
    # These weights keep the scale of their first amax. A weight in bfloat16 takes that of a
    # history, which may be 1/8 larger. So losses differ.
    found.append(
        row(
            f"{name}, weights in FP8", "delayed", "lora", "--weights", "fp8", "--trainer", "fp8",
        )
    )  # fmt: skip
    found.append(
        row(
            f"{name}, added after fp8.convert", "current", "lora", "--order", "convert-first",
            refuses=r"qwix was applied to a Qwen3 that fp8\.convert made",
        )
    )  # fmt: skip
    return found


def grpo() -> list[Row]:
    return [
        row("GRPO", each, "grpo", "--steps", "4", "--rate", "1e-3", losses=4)
        for each in ("bfloat16", "current", "blockwise")
    ]


CLIENT = Client(
    name="tunix",
    title="Tunix 0.1.7",
    python="3.12",
    packages=("jax==0.12.0.1", "flax==0.12.12", "google-tunix==0.1.7", "qwix==0.1.8"),
    command=("{here}/tunix_train.py",),
    loss=r"(?m)^step \d+ loss (\S+)",
    losses=6,
    prints={
        "rewards": r"(?m)^reward (\S+)",
        "trained_parameters": r"(?m)^trained parameters: (\d+) of ",
        "bytes": r"(?m)^bytes of the model: (\d+)",
    },
    program=".*train_step.*",
    rows=(*full(), *resumed(), *experts(), *adapters(), *grpo()),
    lines={"jaxfp8": "2, with state 9", "own FP8": "none", "qwix": "3"},
)
