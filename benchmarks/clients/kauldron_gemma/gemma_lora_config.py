"""As gemma_config.py, with gemma's LoRA: the adapters alone are trained.

The optimizer is that of gemma's examples/lora.py.
"""

import gemma_config
from kauldron import konfig

with konfig.imports():
    import optax
    from kauldron import kd


def get_config():
    config = gemma_config.get_config()
    config.model.lora = 4
    config.optimizer = kd.optim.partial_updates(optax.adamw(3e-3), mask=kd.optim.select("lora"))
    return config
