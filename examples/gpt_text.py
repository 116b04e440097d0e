"""The text of train_gpt.py. A token is a byte, and some blocks of bytes are for validation only.

A window is a piece of text of T + 1 bytes: T tokens and the next one.

Letters in shapes: N bytes to train on, V windows to validate on, T tokens of a window.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

CONTEXT, BATCH = 64, 16  # tokens of a window, windows of a step
# 1024 windows of 64 tokens: 64 Ki tokens
BLOCK_BYTES, VALIDATION_EVERY, VALIDATION_WINDOWS = 4096, 20, 1024
# In bytes. The smallest window has one token and the next one. There is one such window to train on
# and one to validate on.
SMALLEST = 4


class Text(NamedTuple):
    """Bytes as tokens. No byte of the file is in both splits."""

    train: np.ndarray  # uint8[N], at least one window
    validation: np.ndarray  # uint8[V, T + 1], the same in every run; V <= 16, or a multiple of 16
    sha256: str

    @property
    def context(self) -> int:
        """T: 64, or less if the text is shorter than two windows."""
        return self.validation.shape[1] - 1

    def __str__(self) -> str:
        windows = f"{len(self.validation):,} windows of {self.context} tokens to validate on"
        shortened = (
            f"; windows are shortened from {CONTEXT} tokens" if self.context < CONTEXT else ""
        )
        return f"{len(self.train):,} bytes to train on, {windows}{shortened}"


def load_text(file: str | None) -> Text:
    """Read a file, or the sorted top-level modules of Python's standard library.

    Raises:
      ValueError: if the file is missing, cannot be read, or is too short.
    """
    if file is not None and not Path(file).is_file():
        raise ValueError(
            f"--data {file or repr(file)}: this is not a file; give the path of a text file, or "
            "leave --data out to train on Python's standard library."
        )
    library = Path(os.__file__).parent
    paths = sorted(library.glob("*.py")) if file is None else [Path(file)]
    try:
        text = b"".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise ValueError(
            f"--data {error.filename}: it cannot be read ({error.strerror}); give another file."
        ) from None
    if len(text) < SMALLEST:
        origin = f"the standard library in {library}" if file is None else f"--data {file}"
        size = f"{len(text)} bytes of text, at least {SMALLEST} are needed"
        raise ValueError(f"{origin}: {size}; give a larger --data FILE.")
    tokens = np.frombuffer(text, np.uint8)
    train, windows = (
        split_blocks(tokens) if len(text) >= VALIDATION_EVERY * BLOCK_BYTES else split_end(tokens)
    )
    count = min(VALIDATION_WINDOWS, len(windows))
    count -= count % BATCH if count > BATCH else 0  # evaluated in batches of one size
    spread = np.linspace(0, len(windows) - 1, count).astype(int)
    return Text(train, windows[spread], hashlib.sha256(text).hexdigest())


def split_blocks(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hold out every 20th block of 4 KiB for validation.

    Returns:
      Bytes to train on, uint8[N], and windows to validate on, uint8[V, T + 1].
    """
    blocks = tokens[: len(tokens) // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    held_out = np.arange(len(blocks)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return blocks[~held_out].ravel(), cut(blocks[held_out], CONTEXT)


def split_end(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hold out the last 5 % of a text with less than 20 blocks, but at least one window.

    The window is shortened so that each half of the text can hold one window.
    """
    context = min(CONTEXT, len(tokens) // 2 - 1)
    held_out = max(len(tokens) // VALIDATION_EVERY, context + 1)
    return tokens[:-held_out], cut(tokens[None, -held_out:], context)


def cut(blocks: np.ndarray, context: int) -> np.ndarray:
    """Cut each block into adjacent windows: uint8[blocks, bytes] -> uint8[V, T + 1]."""
    whole = blocks.shape[1] // (context + 1) * (context + 1)
    return blocks[:, :whole].reshape(-1, context + 1)


def printable(text: bytes, encoding: str) -> str:
    """Make text for a terminal with this encoding.

    Control characters and bytes that are not text become escapes.
    """
    decoded = text.decode("utf-8", "backslashreplace")
    shown = (
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in decoded
    )
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)
