"""MaxText: its pre-training command, with the patch of docs/maxtext.md.

Two layers of width 512, and random tokens. On 4 devices each shard of a weight has whole tiles of
128. `metrics_file=` has the losses with all digits; the command prints three.

MaxText draws other initial weights if layers have a quantization. `identity` has the weights of an
FP8 run, and multiplies without FP8, so FP8 is compared with it, too.
"""

import functools

from _client import RECIPES, Client, Row, documented

STEPS = 6
OF_QUANTIZATION = {"bfloat16": (), "its fp8": ("quantization=fp8",)}
OF_QUANTIZATION["qwix"] = ("quantization=fp8_full", "use_qwix_quantization=true")
OF_QUANTIZATION |= {n: (f"quantization=jaxfp8_{n}",) for n in ("identity", *RECIPES)}
ALL = tuple(OF_QUANTIZATION)
WITHOUT_ITS = tuple(name for name in ALL if name != "its fp8")
WITHOUT_FP8 = ("bfloat16", "identity")
PLAIN = (*WITHOUT_FP8, *RECIPES)
FEW = ("bfloat16", "identity", "qwix", "delayed", "blockwise")

FSDP = ("ici_fsdp_parallelism=4",)
FSDP_TENSOR = ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")
NARROW = ("base_emb_dim=256",)
APART = ("scan_layers=false",)
REMAT = "minimal_with_quantization"
ACCUMULATE = ("gradient_accumulation_steps=2",)
# megablox=false: MaxText then calls jax.lax.ragged_dot, as it must for qwix on a CPU. Its own
# kernel runs there in an interpreter, and takes minutes to compile. jaxfp8 replaces both.
MIXTRAL = (
    "decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=512",
    "megablox=false",
)  # fmt: skip
DEEPSEEK = (
    "decoder_block=deepseek", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=512",
    "megablox=false",
    "shared_experts=1", "first_num_dense_layers=1", "attention_type=mla", "q_lora_rank=0",
    "kv_lora_rank=128", "qk_nope_head_dim=64", "qk_rope_head_dim=64", "v_head_dim=64",
)  # fmt: skip
DENSE = ("sparse_matmul=false",)
CAPACITY = (*DENSE, "capacity_factor=1.0")
SAVES = (
    "enable_checkpointing=true", "async_checkpointing=false", "checkpoint_period=4",
    "learning_rate_schedule_steps=8", "base_output_directory={scratch}/saved",
)  # fmt: skip


def rows(name: str, recipes: tuple[str, ...], *arguments: str, devices: int = 1) -> list[Row]:
    return [
        Row(
            name=name,
            recipe=recipe,
            arguments=(*arguments, *OF_QUANTIZATION[recipe]),
            devices=devices,
        )
        for recipe in recipes
    ]


def resumed(recipe: str) -> list[Row]:
    """A run of 8 steps, and one that stops after 5 and is continued."""
    quantization = OF_QUANTIZATION[recipe]
    return [
        Row(
            name="8 steps", recipe=recipe, losses=8,
            arguments=("steps=8", "learning_rate_schedule_steps=8", *quantization),
        ),
        Row(
            name="resumed after 5 steps", recipe=recipe, losses=3, like=("8 steps", recipe),
            setup=((*SAVES, "steps=5", *quantization),),
            arguments=(*SAVES, "steps=8", *quantization),
        ),
    ]  # fmt: skip


def exact() -> list[Row]:
    """`blockwise` with two remat policies. Without excess precision XLA keeps each rounding."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_allow_excess_precision=false"}
    quantization = OF_QUANTIZATION["blockwise"]
    name = "no excess precision"
    return [
        Row(name=name, recipe="blockwise", arguments=quantization, environment=flags),
        Row(
            name=f"{name}, {REMAT}", recipe="blockwise", environment=flags,
            arguments=(f"remat_policy={REMAT}", *quantization), like=(name, "blockwise"),
        ),
    ]  # fmt: skip


def refused(name: str, recipe: str, refuses: str, *arguments: str) -> Row:
    given = (*arguments, *OF_QUANTIZATION[recipe])
    return Row(name=name, recipe=recipe, arguments=given, refuses=refuses, devices=4)


CLIENT = Client(
    name="maxtext",
    title="MaxText e591f30c",
    python="3.12",
    packages=(
        "absl-py==2.5.1", "aqtp==0.9.0", "array-record==0.8.6", "chex==0.1.92", "datasets==5.2.0",
        "drjax==0.2.1", "flax==0.12.12", "jax==0.12.0.1", "jaxlib==0.12.0.1",
        "grain[parquet]==0.2.18", "huggingface_hub==1.33.0", "jaxtyping==0.3.11",
        "jsonlines==4.0.0", "ml-collections==1.1.0", "ml-goodput-measurement==0.2.3",
        "omegaconf==2.4.0",
        "optax==0.2.8", "orbax-checkpoint==0.12.8", "parameterized==0.9.0", "pathwaysutils==0.1.13",
        "pillow==13.0.0", "pydantic==2.14.4", "sentencepiece==0.2.3", "tensorboardx==2.6.5",
        "tiktoken==0.14.0", "tokamax==0.0.17", "transformers==5.12.1", "uvloop==0.23.0",
        "qwix==0.1.8", "jinja2==3.1.6", "sympy==1.14.0", "cloud-accelerator-diagnostics==0.1.1",
        "google-tunix==0.1.7",
    ),
    checkout="AI-Hypercomputer/maxtext e591f30c",
    patches=(functools.partial(documented, "maxtext.md", "maxtext patch"),),
    command=(
        "-m", "maxtext.trainers.pre_train.train", "src/maxtext/configs/base.yml", "run_name=t",
        "base_output_directory={scratch}", "metrics_file={scratch}/metrics",
        "jax_cache_dir=",  # XLA dumps nothing for a program in a cache
        "dataset_type=synthetic", f"steps={STEPS}", "hardware=cpu", "per_device_batch_size=1",
        "max_target_length=128", "base_emb_dim=512", "base_num_query_heads=4",
        "base_num_kv_heads=4", "base_mlp_dim=512", "base_num_decoder_layers=2", "head_dim=64",
        "vocab_size=512", "enable_checkpointing=false", "attention=dot_product",
        "enable_goodput_recording=false", "skip_jax_distributed_system=true",
        "tokenizer_path=src/maxtext/assets/tokenizers/tokenizer.llama2",
    ),
    environment={
        "DECOUPLE_GCLOUD": "TRUE",
        "MAXTEXT_REPO_ROOT": "{checkout}",
        "PYTHONPATH": "{checkout}/src",
        # Compiles faster. It changes what LLVM makes of a program, not what XLA does.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    },
    loss=r'"learning/loss": ([0-9.e+-]+|NaN)',
    loss_file="{scratch}/metrics",
    losses=STEPS,
    program="jit_train_step",
    rows=(
        *rows("4 devices, FSDP", ALL, *FSDP, devices=4),
        *rows("4 devices, FSDP, sparse experts", WITHOUT_ITS, *MIXTRAL, *FSDP, devices=4),
        *rows("sparse experts, megablox", ("delayed",), *MIXTRAL, "megablox=true"),
        refused("4 devices, FSDP, width 256", "blockwise", "cut the tiles", *FSDP, *NARROW),
        refused("sparse experts", "its fp8", "no attribute 'quant_dg'", *MIXTRAL),
        *rows("gradient accumulation", (*WITHOUT_FP8, "delayed", "blockwise"), *ACCUMULATE),
        refused("gradient accumulation", "its fp8", "not compatible with gradient", *ACCUMULATE),
        *resumed("delayed"),
        *resumed("blockwise"),
        *rows("DeepSeek, sparse experts", FEW, *DEEPSEEK),
        *rows("dense experts", FEW, *MIXTRAL, *DENSE),
        *rows("4 devices, FSDP and tensor", ALL, *FSDP_TENSOR, devices=4),
        *rows(
            "4 devices, FSDP and tensor, sparse experts",
            (*WITHOUT_FP8, "delayed", "blockwise"),
            *MIXTRAL, *FSDP_TENSOR, devices=4,
        ),
        *rows("DeepSeek, dense experts", (*WITHOUT_FP8, "delayed"), *DEEPSEEK, *DENSE),
        *rows("dense experts of a capacity", (*WITHOUT_FP8, "delayed"), *MIXTRAL, *CAPACITY),
        *rows("4 devices, FSDP, layers apart", PLAIN, *FSDP, *APART, devices=4),
        *rows("1 device", ALL),
        *rows("1 device, layers apart", PLAIN, *APART),
        *rows("4 devices, FSDP and tensor, layers apart", PLAIN, *FSDP_TENSOR, *APART, devices=4),
        *rows(f"remat {REMAT}", (*WITHOUT_FP8, "delayed", "blockwise"),
              f"remat_policy={REMAT}"),
        *rows("remat save_dot_except_mlpwi", ("delayed",), "remat_policy=save_dot_except_mlpwi"),
        *exact(),
    ),
    lines={"jaxfp8": "1, after a patch", "its fp8": "1 (fp8)", "qwix": "2"},
)  # fmt: skip
