"""MaxText for TPUs: its own command compiles the train step for a slice that is not there.

Nothing runs, so there are no losses. The matmuls and gathers of the optimized program count.
"""

import dataclasses

from _client import Row
from maxtext_client import CLIENT as ON_CPU
from maxtext_client import OF_QUANTIZATION

RECIPES = ("bfloat16", "qwix", "delayed", "current", "rowwise")  # tiles are multiplied in bfloat16

CLIENT = dataclasses.replace(
    ON_CPU,
    name="maxtext_tpu",
    title="MaxText e591f30c, compiled for 8 cores of TPU 7x",
    packages=(*ON_CPU.packages, "libtpu==0.0.50.1"),
    command=(
        "-m", "maxtext.trainers.pre_train.train_compile", "src/maxtext/configs/base.yml",
        "run_name=t", "base_output_directory={scratch}", "compile_topology=tpu7x-8",
        "compile_topology_num_slices=1", "jax_cache_dir=", "dataset_type=synthetic", "steps=6",
        "per_device_batch_size=1", "max_target_length=512", "base_emb_dim=1024",
        "base_num_query_heads=8", "base_num_kv_heads=8", "base_mlp_dim=4096",
        "base_num_decoder_layers=2", "head_dim=128", "vocab_size=2048",
        "enable_checkpointing=false", "attention=dot_product", "enable_goodput_recording=false",
        "skip_jax_distributed_system=true",
        "tokenizer_path=src/maxtext/assets/tokenizers/tokenizer.llama2",
    ),
    environment={
        **ON_CPU.environment, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    loss="no loss is printed",
    loss_file=None,
    losses=0,
    prints={"temporary_bytes": r"Memory analysis: .*?\btemp_size_in_bytes=(\d+)"},
    counts="_tpu_matmuls.py",
    rows=tuple(
        Row(name="FSDP", recipe=recipe, arguments=OF_QUANTIZATION[recipe]) for recipe in RECIPES
    ),
)  # fmt: skip
