"""What is done to the directory of a run that `train_gpt.py` saved, and what is said of it."""

import json
import os
import shutil

import numpy as np

STEPS, HALF = 6, 3  # the run saves at both


def newest(run):
    return run / "FP8" / str(STEPS)


def description(run):
    return newest(run) / "description.json"


def largest(run):
    """The file with most of the arrays."""
    return max(newest(run).rglob("*"), key=lambda file: file.stat().st_size)


def edit_description(**fields):
    def edit(run):
        description(run).write_text(json.dumps(json.loads(description(run).read_text()) | fields))

    return edit


def replace_by_file(path):
    if path.is_dir():
        shutil.rmtree(path)
    path.write_text("words")


def not_a_checkpoint(run):
    shutil.rmtree(run)
    (run / "photos").mkdir(parents=True)
    (run / "photos" / "1.png").write_text("picture")


def flip(file, count):
    """Other bytes in the middle."""
    content = bytearray(file.read_bytes())
    for at in range(len(content) // 2, len(content) // 2 + count):
        content[at] ^= 0x5A
    file.write_bytes(bytes(content))


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


# What is done to the directory, and what is said of it.
DAMAGES = {
    "missing": (shutil.rmtree, "there is no such directory; give the directory of a run, or"),
    "empty": (empty, "it holds no checkpoint bf16/STEP/ or FP8/STEP/; give the directory of a"),
    "a file": (replace_by_file, "run is a file; give a directory"),
    "its folder is a file": (lambda run: replace_by_file(run / "FP8"), "FP8 is a file; give"),
    "not a checkpoint": (not_a_checkpoint, "it holds no checkpoint"),
    "only a file": (lambda run: empty(run / "FP8") or (run / "FP8" / "6").touch(), "no checkpoint"),
    "a step is empty": (lambda run: empty(newest(run)), "FP8/6: .*description.json: FileNotFound"),
    "no description": (lambda run: description(run).unlink(), "description.json: FileNotFound"),
    "no arrays": (lambda run: shutil.rmtree(newest(run) / "arrays"), "arrays/.* is missing"),
    "arrays lost": (lambda run: largest(run).unlink(), "arrays/.* is missing"),
    "arrays truncated": (
        lambda run: os.truncate(largest(run), 99),
        "/d/.* has changed since it was",
    ),
    "a byte changed": (lambda run: flip(largest(run), 1), "/d/.* has changed since it was saved"),
    "JSON truncated": (lambda run: os.truncate(description(run), 99), "json: JSONDecodeError"),
    "bytes in JSON": (lambda run: description(run).write_bytes(b"\xff"), "json: UnicodeDecode"),
    "a list in JSON": (lambda run: description(run).write_text("[1]"), "json: TypeError"),
    "no digests": (edit_description(files=[]), "description.json does not describe a run"),
    "other digests": (edit_description(files={}), "arrays/.* has changed since it was saved"),
    "other shapes": (edit_description(shapes={}), "is absent, in the model it is float32"),
    "another step": (edit_description(step=5), "description.json describes step 5"),
    "a renamed step": (lambda run: newest(run).rename(run / "FP8" / "9"), "json describes step 6"),
}


def without(file):
    file.unlink()


def halved(file):
    os.truncate(file, file.stat().st_size // 2)


def noise(file):
    file.write_bytes(np.random.default_rng(0).bytes(file.stat().st_size))
