"""What the models of others learn: text, digits of a picture, noise, and sums.

Letters in shapes: B examples of a batch, T tokens of a window, S characters of a sum.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt_text import BATCH, CONTEXT, load_text

IMAGES = 64  # pictures of a step
SUMS = 128  # sums of a step
CHARACTERS = "+0123456789="  # of a sum. Before them come 0 for padding, and 1 for the end
QUESTION, ANSWER = 8, 6  # characters of the longest question "99+999" and answer "=1098", ends too


class Task(NamedTuple):
    """Batches, and the loss of a model on one.

    Attributes:
      training: from a generator of random numbers to one batch, a tree of arrays.
      validation: the batches to validate on, the same in each run.
      inputs: from a batch to what the model is called with.
      loss: from the result of that call and the batch to a scalar.
    """

    training: Callable[[np.random.Generator], Any]
    validation: list[Any]
    inputs: Callable[[Any], tuple[Any, ...]]
    loss: Callable[[Any, Any], jax.Array]

    def batches(self, seed: int, steps: int) -> Iterator[Any]:
        """The batches of a run."""
        random = np.random.default_rng(seed)
        return (self.training(random) for _ in range(steps))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """In nats per label."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.cache
def text() -> Task:
    """The next byte of Python's standard library. A batch is uint8[B, T + 1]."""
    source = load_text(None)

    def training(random: np.random.Generator) -> np.ndarray:
        places = random.integers(0, len(source.train) - CONTEXT, (BATCH, 1))
        return source.train[places + np.arange(CONTEXT + 1)]

    return Task(
        training,
        list(source.validation.reshape(-1, BATCH, CONTEXT + 1)),
        lambda windows: (windows[:, :-1].astype(jnp.int32),),
        lambda logits, windows: cross_entropy(logits, windows[:, 1:].astype(jnp.int32)),
    )


@functools.cache
def _digits() -> tuple[list[tuple[np.ndarray, np.ndarray]], ...]:
    """Handwritten digits, float32[8, 8] from -1 to 1: 1500 to train on, 297 to validate on."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images / 8 - 1).astype(np.float32)
    return (images[:1500], data.target[:1500]), (images[1500:], data.target[1500:])


def _large(images: np.ndarray) -> np.ndarray:
    """Each pixel becomes 2 x 2 pixels."""
    return images.repeat(2, -1).repeat(2, -2)


def _validation(training: Callable[..., Any], count: int) -> list[Any]:
    random = np.random.default_rng(2**31)  # no seed of a run
    return [training(random, held_out=True) for _ in range(count)]


@functools.cache
def one_of_four() -> Task:
    """One of the four digits of a picture. Nobody can know which, so the best loss is about ln 4.

    A batch is (float32[B, 32, 32, 1], int32[B]).
    """

    def training(random: np.random.Generator, held_out: bool = False) -> tuple[np.ndarray, ...]:
        images, labels = _digits()[held_out]
        four = random.integers(0, len(images), (4, IMAGES))
        rows = [np.concatenate(_large(images[four[i : i + 2]]), -1) for i in (0, 2)]
        label = labels[four[random.integers(0, 4, IMAGES), np.arange(IMAGES)]]
        return np.concatenate(rows, -2)[..., None], label.astype(np.int32)

    return Task(
        training,
        _validation(training, 16),
        lambda batch: (batch[0],),
        lambda logits, batch: cross_entropy(logits, batch[1]),
    )


@functools.cache
def velocity() -> Task:
    """From a mixture of a digit and noise to digit - noise (rectified flow, arXiv:2209.03003).

    A batch is (mixtures float32[B, 16, 16, 1], times float32[B], labels int32[B], results). The
    loss is a squared error.
    """

    def training(random: np.random.Generator, held_out: bool = False) -> tuple[np.ndarray, ...]:
        images, labels = _digits()[held_out]
        chosen = random.integers(0, len(images), IMAGES)
        digits = _large(images[chosen])[..., None]
        noise = random.standard_normal(digits.shape, np.float32)
        times = random.random(IMAGES, np.float32)
        mixed = noise + times[:, None, None, None] * (digits - noise)
        return mixed, times * 1000, labels[chosen].astype(np.int32), digits - noise

    return Task(
        training,
        _validation(training, 16),
        lambda batch: batch[:3],
        lambda result, batch: jnp.mean(jnp.square(result.astype(jnp.float32) - batch[3])),
    )


@functools.cache
def sums() -> Task:
    """Sums of numbers below 100 and below 1000, written out. A batch is one-hot codes.

    They are float32[B, S, 14]: question and answer. Padding after an answer does not count.
    """
    codes = {character: i + 2 for i, character in enumerate(CHARACTERS)}
    size = len(codes) + 2

    def encoded(texts: list[str], length: int) -> np.ndarray:
        rows = [[codes[c] for c in text] + [1] + [0] * (length - len(text) - 1) for text in texts]
        return np.eye(size, dtype=np.float32)[rows]

    def training(random: np.random.Generator, held_out: bool = False) -> tuple[np.ndarray, ...]:
        del held_out  # no two batches are alike
        pairs = list(
            zip(random.integers(0, 100, SUMS), random.integers(0, 1000, SUMS), strict=True)
        )
        questions = encoded([f"{a}+{b}" for a, b in pairs], QUESTION)
        return questions, encoded([f"={a + b}" for a, b in pairs], ANSWER)

    def loss(logits: jax.Array, batch: Any) -> jax.Array:
        answer = batch[1][:, 1:]
        counted = 1 - answer[..., 0]
        losses = optax.softmax_cross_entropy(logits.astype(jnp.float32), answer)
        return jnp.sum(losses * counted) / jnp.sum(counted)

    return Task(training, _validation(training, 8), lambda batch: batch, loss)
