"""torchao's 8-bit AdamW in the setting of `stopped_gradients.py`. It needs torch."""

import importlib.util
from typing import Any

import numpy as np


def is_installed() -> bool:
    """Whether torch and torchao are there. If not, says so."""
    missing = [name for name in ("torch", "torchao") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"--torchao is skipped without {', '.join(missing)}. pip install torch torchao")
    return not missing


def movements(
    masks: dict[str, Any], gradients: Any, rate: float, b2: float, stop: int, counted: int
) -> dict[str, Any]:
    """|sum of updates| in learning rates of each weight. Its blocks are 256 flat values.

    Args:
      masks: bool [rows, columns] of each weight: the entries whose gradient becomes 0.
      gradients: float32 [steps, rows, columns].
      rate: the learning rate.
      b2: decay of the second moment.
      stop: the first step with gradients of 0.
      counted: the first step that counts.
    """
    import torch
    from torchao.optim import AdamW8bit

    moved = {}
    for name, mask in masks.items():
        w = torch.nn.Parameter(torch.zeros(mask.shape))
        tx = AdamW8bit([w], lr=rate, betas=(0.9, b2), weight_decay=0.0)
        total, stopped = torch.zeros(mask.shape), torch.from_numpy(mask)
        for index, gradient in enumerate(np.array(gradients)):
            g = torch.from_numpy(gradient)
            w.grad = torch.where(stopped, 0.0, g) if index >= stop else g
            w.data.zero_()  # the new weight is then the update
            tx.step()
            if index >= counted:
                total += w.detach() / rate
        moved[name] = np.abs(total.numpy())
    return moved
