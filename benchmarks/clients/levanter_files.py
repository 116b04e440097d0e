"""Writes what levanter's commands read: its config, random tokens, a tokenizer of Hugging Face.

python levanter_files.py FOLDER

A token is a word, "t17". Tokens of a line follow each other by small steps, so that a model learns.
"""

import json
import random
import sys
from pathlib import Path

VOCABULARY, LINES, LENGTH = 512, 160, 128


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    steps = random.Random(0)
    with (folder / "tokens.jsonl").open("w") as file:
        for _ in range(LINES):
            at, words = steps.randrange(VOCABULARY), []
            for _ in range(LENGTH):
                at = (at + steps.randrange(5)) % VOCABULARY
                words.append(f"t{at}")
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{i}": i for i in range(VOCABULARY)},
            "unk_token": "t0",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    config = Path(__file__).with_name("levanter.yaml").read_text()
    (folder / "levanter.yaml").write_text(config.replace("FOLDER", str(folder)))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
