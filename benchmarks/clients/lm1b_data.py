"""Writes a small stand-in for the data set lm1b of TFDS, then runs a command of a flax example.

    TFDS_DATA_DIR=FOLDER python lm1b_data.py tfrecord examples/lm1b/main.py --workdir=...

The examples read lm1b by its name, from the folder in `TFDS_DATA_DIR`. Its sentences here are made
of 300 words by a random walk, so that there is something to learn.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

_SENTENCES = {"train": 4000, "test": 64}
_LETTERS = ("bdfgklmnprstvz", "aeiou")


def _sentences(split: str) -> Iterator[tuple[int, dict[str, str]]]:
    chance = random.Random(0)
    words = ["".join(map(chance.choice, _LETTERS * chance.randint(1, 3))) for _ in range(300)]
    followers = [[chance.randrange(300) for _ in range(4)] for _ in words]
    chance = random.Random(split)
    for i in range(_SENTENCES[split]):
        word, sentence = chance.randrange(300), []
        for _ in range(chance.randint(6, 24)):
            sentence.append(words[word])
            word = chance.choice(followers[word])
        yield i, {"text": " ".join(sentence)}


if __name__ == "__main__":
    form, *command = sys.argv[1:]  # grain reads array_record, tf.data reads tfrecord
    if not Path(os.environ["TFDS_DATA_DIR"]).exists():
        tfds.dataset_builders.AdhocBuilder(
            name="lm1b",
            version="1.1.0",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            split_datasets={split: list(_sentences(split)) for split in _SENTENCES},
            data_dir=os.environ["TFDS_DATA_DIR"],
            file_format=form,
        ).download_and_prepare()
    os.execv(sys.executable, (sys.executable, *command))
