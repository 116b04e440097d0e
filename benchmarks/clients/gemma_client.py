"""gemma 4.0.1 with its LoRA, by Kauldron's own command, which gemma's examples use.

In the folder kauldron_gemma, gemma_config.py trains all parameters, and gemma_lora_config.py trains
adapters alone.
"""

from _client import RECIPES, Client, Row
from lm1b_client import PACKAGES

ALL, LORA, CONVERTED = "all parameters", "LoRA", "LoRA of a converted model"
FIRST = "--cfg.model.order=convert first"


def rows(name, recipes, *arguments, **options):
    config = "gemma_config" if name == ALL else "gemma_lora_config"
    config = f"--cfg={{here}}/kauldron_gemma/{config}.py"
    for recipe in recipes:
        # Kauldron wants the config before what overrides it.
        given = (config, "--cfg.workdir={scratch}/work", f"--cfg.model.recipe={recipe}", *arguments)
        yield Row(name=name, recipe=recipe, arguments=given, **options)


CLIENT = Client(
    name="gemma",
    title="gemma 4.0.1 with Kauldron 1.4.4 (Gemma 2, 2 layers of 256)",
    python="3.12",
    packages=(
        *PACKAGES,
        "chex==0.1.92",
        "immutabledict==4.3.1",
        "lark==1.3.1",
        "dialog==1.1.0",
        "mediapy==1.2.7",
        "altair==6.3.0",
        "pandas==3.1.1",
        "scikit-image==0.26.0",
        "scikit-learn==1.9.1",
        "tabulate==0.10.0",
        "typeguard==4.6.1",
        "graphviz==0.21",
        "pillow==13.0.0",
        "einops==0.8.2",
    ),
    alone=("gemma==4.0.1", "kauldron==1.4.4"),
    command=("-m", "kauldron.main"),
    environment={"PYTHONPATH": "{here}/kauldron_gemma", "TF_CPP_MIN_LOG_LEVEL": "3"},
    loss=r"losses/xentropy=([\d.]+)",
    losses=6,
    program="jit_step",
    rows=(
        *rows(LORA, ("bfloat16", "qwix", *RECIPES)),
        *rows(ALL, ("bfloat16", "qwix", "identity", *RECIPES)),
        # Keys of Kauldron do not pass from one `init` into another.
        *rows(CONVERTED, ("current",), FIRST, refuses="First argument passed to an init function"),
    ),
    lines={"jaxfp8": "2, with state 20", "own FP8": "none", "qwix": "4"},
)
