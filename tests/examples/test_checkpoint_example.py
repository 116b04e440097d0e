"""fine_tune_checkpoint.py: the export has the weights of training, and loads again. Mistakes."""

import json
import re

import numpy as np
import pytest
from launch import load

import jaxfp8 as fp8

pytest.importorskip("matplotlib", reason="the examples need pip install 'jaxfp8[examples]'")
pytest.importorskip("rich", reason="the examples need pip install 'jaxfp8[examples]'")

SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}


@pytest.fixture(scope="module")
def example():
    script = load("fine_tune_checkpoint.py")
    for config in script.TINY.values():
        config.update(SMALL)
    return script


def arguments(*more):
    return ["in", "out", "--steps", "1", "--data", "ids.npy", *more]


@pytest.fixture
def ids(tmp_path):
    """Few tokens, so that windows are short."""
    np.save("ids.npy", np.arange(20, dtype=np.uint16) % 7)


@pytest.mark.usefixtures("standard_promotion", "ids")
@pytest.mark.parametrize(
    ("family", "format", "recipe"),
    [("llama", "hf-fp8", "blockwise"), ("qwen3", "none", "current")],
)
def test_in_and_out_again(example, capsys, tmp_path, family, format, recipe):
    example.main(arguments("--random", family, "--format", format, "--recipe", recipe))
    out = capsys.readouterr().out
    bf16, in_fp8 = map(float, re.search(r"loss of in: bf16 ([\d.]+), FP8 ([\d.]+)", out).groups())
    assert 0 < abs(bf16 - in_fp8) < 0.1
    assert f"format {None if format == 'none' else format}: 7 as it is\n" in out
    assert re.search(r"out: 0 of [\d,]+ weights differ", out)
    trained, loaded = re.search(r"trained ([\d.]+), loaded from out ([\d.]+)", out).groups()
    assert trained == loaded
    source, written = (
        json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out")
    )
    in_fp8 = written.pop("quantization_config", {"quant_method": None})
    assert in_fp8["quant_method"] == ("fp8" if format == "hf-fp8" else None)
    assert written == source
    # Parameters have moved.
    names = example.rows(source)
    models = [example.Decoder(source, None) for _ in range(2)]
    before, after = (
        fp8.checkpoint.load(folder, like=model, names=names)
        for folder, model in zip(("in", "out"), models, strict=True)
    )
    assert example.compare(before, after, names)[0] > 0


@pytest.mark.usefixtures("standard_promotion", "ids")
@pytest.mark.parametrize(
    ("folder", "more", "message"),
    [
        ("missing", (), "missing/config.json cannot be read: "),
        ("gpt", (), "gpt/config.json: this example does not compute model_type 'gpt2'; give a "),
        (".", ("--random", "llama"), "--random: . exists already; give a new FOLDER."),
        ("out", (), "OUT out: that is FOLDER; give another folder."),
        ("gpt", ("--steps", "0"), "--steps 0: give at least 1."),
        ("new", ("--random", "llama", "--data", "no.npy"), "--data no.npy: it cannot be read"),
        ("new", ("--random", "llama", "--data", "big.npy"), "--data big.npy: it has ids up to 900"),
        ("new", ("--random", "llama", "--data", "square.npy"), "--data square.npy: it has int64[3"),
    ],
)
def test_mistakes(example, capsys, tmp_path, folder, more, message):
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    np.save("big.npy", np.full(20, 900))
    np.save("square.npy", np.ones((3, 3), np.int64))
    with pytest.raises(SystemExit) as ended:
        example.parse([folder, "out", "--data", "ids.npy", *more])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fine_tune_checkpoint.py: error: {message}"), err
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("standard_promotion", "ids")
def test_a_checkpoint_that_does_not_fit_is_named_before_the_training(example, capsys):
    given = arguments("--random", "llama")
    example.write_random(example.Path("in"), example.TINY["qwen3"], seed=0)
    config = json.loads(example.Path("in/config.json").read_text())
    example.Path("in/config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(SystemExit):
        example.main(given[:-2])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "q_norm.weight is no parameter of the model" in err
