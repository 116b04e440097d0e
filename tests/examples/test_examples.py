"""The examples run as users run them.

What they print, draw and write, and which text they train on.
"""

import io
import json
import platform
import re
import subprocess
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launch import EXAMPLES, ROOT, load, run

from jaxfp8.matmul import _three_matmuls
from jaxfp8.plan._autotune import _Recorder

pytest.importorskip("matplotlib", reason="the examples need pip install 'jaxfp8[examples]'")
pytest.importorskip("rich", reason="the examples need pip install 'jaxfp8[examples]'")

FIELDS = [
    "bf16_compile_seconds",
    "bf16_losses",
    "bf16_seconds",
    "bf16_val_loss",
    "chip",
    "compile_seconds",
    "context",
    "data",
    "framework",
    "in_fp8",
    "jax",
    "layers",
    "learning_rate",
    "losses",
    "parameters",
    "python",
    "recipe",
    "recipe_fields",
    "sample",
    "schedule_steps",
    "seconds",
    "seed",
    "sha256",
    "steps",
    "val_loss",
    "width",
]

POEM = b"\xff an owl and a pussycat went to sea\n" * 2

# Tiles do not divide these widths. Other tests train with the other recipes.
QUICK = {("blockwise", 160), ("mxfp8", 96)}


@pytest.fixture(scope="module")
def train_gpt():
    return load("train_gpt.py")


def parameters_of(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.usefixtures("standard_promotion")
def test_readme_s_command_compares_with_bf16(train_gpt, tmp_path):
    """As users run it, but on a poem, from which it also draws a sample."""
    (command,) = re.findall(r"python examples/(train_gpt\.py.*)", (ROOT / "README.md").read_text())
    (tmp_path / "poem").write_bytes(POEM)
    small = {"--data": "poem", "--width": 32, "--layers": 1, "--steps": 3, "--sample": 40}
    arguments = [word for pair in small.items() for word in pair]
    finished = run(*command.split(), *arguments, "--json", "result.json", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    output = finished.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert sorted(result) == FIELDS
    assert (result["recipe"], result["steps"], result["seed"], result["framework"]) == (
        "delayed",
        3,
        0,
        "linen",
    )
    assert (result["python"], result["jax"]) == (platform.python_version(), jax.__version__)
    assert (result["width"], result["layers"], result["context"]) == (32, 1, 35)
    size = train_gpt.Size(width=32, layers=1, context=35)
    shapes = jax.eval_shape(lambda: train_gpt.FRAMEWORKS["linen"](None, 0, size).params)
    assert result["parameters"] == parameters_of(shapes)
    assert len(result["sha256"]) == 64
    assert len(result["losses"]) == len(result["bf16_losses"]) == 3
    # Not 0, or both would be the same model. In three steps without warm-up Adam divides rounding
    # by rounding.
    assert 0 < abs(result["val_loss"] - result["bf16_val_loss"]) < 0.2
    assert min(result["seconds"], result["bf16_seconds"]) > 0
    picture = tmp_path / "runs" / "train_gpt.png"
    assert output.endswith(f"\npicture: {picture}\nresults: {tmp_path / 'result.json'}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Losses come as they are known, also where standard output is no terminal.
    for prefix, name in {"": "FP8", "bf16_": "bf16"}.items():
        shown = re.findall(
            rf"^ *{name} step \d/3  loss (\d\.\d{{3}})  +[\d,]+ tokens/s$",
            output,
            re.MULTILINE,
        )
        assert shown == [f"{loss:.3f}" for loss in result[prefix + "losses"]]
    for shown in (
        "tokens/s",
        "validation loss",
        "gap",
        f"{result['val_loss']:.4f}",
        f"{result['bf16_val_loss']:.4f}",
    ):
        assert shown in output
    assert_of_a_poem(output, result)


def assert_of_a_poem(output, result):
    """What a run on POEM says first, and the sample that it says last."""
    assert output.startswith(
        "poem: 36 bytes to train on, 1 windows of 35 tokens to validate on; windows are shortened "
        "from 64 tokens\nchip: cpu\n"
    )
    assert " FP8: warning: expected every matmul of a recipe in FP8, found 0 in FP8 and " in output
    assert (result["chip"], result["in_fp8"]) == ("cpu", False)
    assert f"\nThe FP8 model writes (temperature 0.8, seed 0):\n{result['sample']}\n" in output
    assert len(result["sample"]) >= 40 / 2


@pytest.mark.slow
def test_train_gpt_in_nnx_alone_on_a_file(tmp_path):
    (tmp_path / "text").write_bytes(
        np.random.default_rng(0).integers(97, 123, 2_000_000, np.uint8).tobytes()
    )
    arguments = (
        "--framework nnx --recipe rowwise --set high_precision_wgrad=true --no-compare --steps 2 "
        "--data text"
    )
    finished = run(
        "train_gpt.py",
        *arguments.split(),
        "--json",
        "result.json",
        "--plot",
        "curve.png",
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert sorted(result) == FIELDS
    assert result["recipe_fields"] == {"high_precision_wgrad": True}
    assert result["bf16_val_loss"] is None
    assert result["bf16_seconds"] is None
    assert result["bf16_losses"] is None
    assert "gap" not in finished.stdout
    assert (tmp_path / "curve.png").exists()


# --------------------------------------------------------------------------------------------- chip
@pytest.mark.usefixtures("standard_promotion")  # flax's LayerNorm promotes
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_kernels_reach_every_layer(train_gpt, framework):
    asked = _Recorder()
    kernels = train_gpt.fp8.Kernels("h200", timings=asked)
    size, recipe = train_gpt.Size(layers=1, width=32), train_gpt.fp8.recipes.current()

    def forward(tokens):
        model = train_gpt.FRAMEWORKS[framework](recipe, 0, size, kernels)
        asked.matmuls.clear()  # of the initialization
        _three_matmuls._fprop.clear_cache()  # what is traced already asks for nothing
        return model.apply(model.params, model.state, tokens)

    jax.eval_shape(forward, jax.ShapeDtypeStruct((1, size.context), np.int32))
    assert len(asked.matmuls) == 4  # qkv, out, fc1, fc2, of four shapes


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_the_chip_chooses_kernels_and_options(train_gpt, framework, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fp8, chosen = train_gpt.fp8, {}

    def model(recipe, seed, size, kernels):
        chosen["bf16" if recipe is None else recipe.name] = kernels
        return train_gpt.Model(None, None, None, fp8_layers=4 if recipe else 0)

    def train(name, model, text, steps, seed, options, *others):
        chosen[f"{name} options"] = options

    monkeypatch.setitem(train_gpt.FRAMEWORKS, framework, model)
    monkeypatch.setitem(train_gpt.train_all.__globals__, "train", train)
    arguments = ["--framework", framework, "--recipe", "rowwise", "--layers", "1"]
    given, recipe, text = train_gpt.parse([*arguments, "--chip", "h200"])
    train_gpt.train_all(given, recipe, text, train_gpt.Settings())
    h200 = fp8.Kernels("h200")
    options = h200.compiler_options(recipe)
    assert options
    expected = {"bf16": h200, "rowwise": h200, "bf16 options": options, "FP8 options": options}
    assert chosen == expected


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "NVIDIA B200", "b200"),
        ("gpu", "NVIDIA L4", "l4"),
        ("gpu", "NVIDIA L40S", "l40s"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "AMD Instinct MI300X", "mi300x"),
        ("tpu", "TPU7x", "tpu7x"),
        ("tpu", "TPU v6 lite", "v6e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v4", None),
        ("cpu", "cpu", "cpu"),
        ("gpu", "NVIDIA GH200 480GB", None),
    ],
)
def test_the_chip_of_this_machine(monkeypatch, platform, kind, name):
    chips, device = load("chips.py"), types.SimpleNamespace(platform=platform, device_kind=kind)
    monkeypatch.setattr(chips.jax, "devices", lambda: [device])
    if name is None:
        with pytest.raises(ValueError, match=f"{kind!r} has no name in fp8.Kernels; give .*--chip"):
            chips.kernels_of(None)
    else:
        assert chips.kernels_of(None).chip == name
        assert chips.describe(chips.kernels_of(None)).startswith(f"chip: {name}")
    assert chips.kernels_of("h100").chip == "h100"


def test_what_runs_is_read_from_the_program(monkeypatch, capsys):
    chips, recipe = load("chips.py"), load("chips.py").fp8.recipes.current()
    label = 'metadata={op_name="jaxfp8.fprop/dot"}'
    in_fp8 = f'custom-call(), custom_call_target="__cublas$lt$matmul$f8", {label}'
    for call, kind, said in (
        (in_fp8, "NVIDIA H200", "all matmuls of the recipe current run in FP8"),
        (f"dot(), {label}", "NVIDIA H200", "1 in high precision. fp8.Kernels('h200').choices("),
        (f"dot(), {label}", "cpu", "1 in high precision. CPUs have no FP8 matmuls"),
    ):
        device = types.SimpleNamespace(platform="cpu" if kind == "cpu" else "gpu", device_kind=kind)
        monkeypatch.setattr(chips.jax, "devices", lambda device=device: [device])
        program = f"ENTRY %main () -> f32[8,8] {{\n  ROOT %d = f32[8,8]{{1,0}} {call}\n}}\n"
        kernels = chips.fp8.Kernels("h200")
        assert chips.print_matmuls("step", program, recipe, kernels) == ("all" in said)
        assert said in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- text
def test_validation_text_is_fixed_and_apart(train_gpt):
    text, again = train_gpt.load_text(None), train_gpt.load_text(None)
    np.testing.assert_array_equal(text.validation, again.validation)
    assert text.validation[:, 1:].shape == (1024, 64)
    training = text.train.tobytes()
    # A window may stand in two modules (licences do); most must not.
    assert sum(window.tobytes() in training for window in text.validation) < 0.1 * len(
        text.validation
    )


@pytest.mark.parametrize("size", [4, 5, 7, 33, 129, 130, 131, 1300, 3000, 81919, 81920, 1_100_000])
def test_any_text_is_split_into_two_parts(train_gpt, tmp_path, size):
    """Of random bytes no window is in the text twice."""
    file = tmp_path / "text"
    whole = np.random.default_rng(0).bytes(size)
    file.write_bytes(whole)
    text = train_gpt.load_text(str(file))
    windows, context = text.validation, text.context
    assert context == min(64, size // 2 - 1)
    assert len(text.train) > context  # at least one window
    assert len(windows) <= 16 or len(windows) % 16 == 0
    training = text.train.tobytes()
    held_out = b"".join(window.tobytes() for window in windows)
    assert len(training) + len(held_out) <= size
    if size >= 81920:
        assert len(windows) == min(1024, size // 4096 // 20 * 63 // 16 * 16)
        assert not any(window.tobytes()[:32] in training for window in windows)
    else:
        assert training == whole[: len(training)]
        assert all(window.tobytes() in whole[len(training) :] for window in windows)
        assert len(training) >= size * 0.95 - 65


@pytest.mark.parametrize(
    ("recipe", "width", "context"),
    [
        pytest.param(recipe, *size, marks=() if (recipe, size[0]) in QUICK else pytest.mark.slow)
        for recipe in ("delayed", "blockwise", "mxfp8", "rowwise")
        for size in ((32, 1), (96, 49), (160, 64))
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_every_recipe_takes_every_width_and_window(train_gpt, recipe, width, context):
    size = train_gpt.Size(layers=1, width=width, context=context)

    def step(tokens):
        model = train_gpt.FRAMEWORKS["linen"](train_gpt.fp8.recipes.get(recipe), 0, size)

        def loss(params, state, tokens):
            logits = model.apply(params, state, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        run = train_gpt.fp8.value_and_grad(loss)
        return model.params, *run(model.params, model.state, tokens)

    tokens = jax.ShapeDtypeStruct((16, context + 1), np.int32)
    params, value, grads, _ = jax.eval_shape(step, tokens)
    assert value.shape == ()
    assert jax.tree.structure(grads) == jax.tree.structure(params)


# ----------------------------------------------------------------------------------------- sampling
def test_bytes_of_any_kind_can_be_printed(train_gpt):
    everything = bytes(range(256)) + "ü€".encode()
    for encoding in ("utf-8", "ascii", "latin-1"):
        shown = train_gpt.printable(everything, encoding)
        io.TextIOWrapper(io.BytesIO(), encoding=encoding).write(shown)
        assert not set(shown) & {chr(i) for i in range(32) if chr(i) not in "\n\t"}
        assert r"\x1b" in shown
        assert r"\x80" in shown
        assert ("ü" in shown) == (encoding != "ascii")
    assert train_gpt.printable("größer\n".encode(), "utf-8") == "größer\n"


def test_a_sample_follows_its_model_window_by_window(train_gpt):
    """A model that counts on from the last of its tokens, once it is told so by parameters and
    state.
    """
    context, seen = 5, []

    def apply(params, state, tokens):
        jax.debug.callback(lambda window: seen.append(window[0].tolist()), tokens, ordered=True)
        return jax.nn.one_hot(tokens + params + state, 256) * 1e4

    model = train_gpt.Model(jnp.int32(0), jnp.int32(0), apply, 0)
    run = train_gpt.Run(np.zeros(1), 0.0, 0.0, 0.0, jnp.int32(1), jnp.int32(1))
    written = train_gpt.sample(model, run, context, 9, 0, 1.0, {})
    jax.effects_barrier()
    assert list(written) == [12, 14, 16, 18, 20, 22, 24, 26, 28]  # after a line break, 10
    assert seen[3] == [10, 12, 14, 16, 0]
    assert seen[-1] == [18, 20, 22, 24, 26]


def test_samples_are_drawn_by_seed_and_temperature(train_gpt):
    model = train_gpt.Model(
        0.0, 0.0, lambda params, state, tokens: jnp.broadcast_to(params, (*tokens.shape, 256)), 0
    )
    run = train_gpt.Run(np.zeros(1), 0.0, 0.0, 0.0, jnp.zeros(256).at[65].set(8.0), {})
    draw = lambda seed, temperature: train_gpt.sample(model, run, 4, 300, seed, temperature, {})
    assert draw(0, 1.0) == draw(0, 1.0) != draw(1, 1.0)
    assert draw(0, 0.1) == b"A" * 300
    assert draw(0, 100.0).count(b"A") < 30


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_poem_is_enough(tmp_path, framework):
    (tmp_path / "poem").write_bytes(POEM)
    numbers = {"--steps": 3, "--width": 64, "--layers": 1, "--learning-rate": 1e-3, "--sample": 40}
    arguments = [
        "--data",
        "poem",
        "--no-compare",
        *(word for pair in numbers.items() for word in pair),
    ]
    finished = run(
        "train_gpt.py", *arguments, "--framework", framework, "--json", "result.json", cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["width"], result["layers"], result["learning_rate"], result["context"]) == (
        64,
        1,
        1e-3,
        35,
    )
    assert_of_a_poem(finished.stdout, result)


def test_git_ignores_the_default_picture():
    train_gpt = load("train_gpt.py")
    for folder in (ROOT, EXAMPLES):
        ignored = subprocess.run(
            ["git", "check-ignore", train_gpt.PLOT], cwd=folder, capture_output=True, check=False
        )
        if ignored.returncode == 128:
            pytest.skip("this is no git repository")
        assert ignored.returncode == 0


@pytest.mark.usefixtures("standard_promotion")  # flax.linen.LayerNorm promotes
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_twins_start_from_the_same_parameters(train_gpt, framework, standard_promotion):
    recipe, small = train_gpt.fp8.recipes.delayed(), train_gpt.Size(layers=1, width=32)
    twins = lambda *size: [
        train_gpt.FRAMEWORKS[framework](used, 3, *size) for used in (recipe, None)
    ]
    ours, theirs = twins(small)
    assert (ours.fp8_layers, theirs.fp8_layers) == (4, 0)
    shapes = jax.eval_shape(lambda: twins()[0].params)
    assert parameters_of(shapes) == pytest.approx(1e6, rel=0.1)
    assert jax.tree.structure(ours.params) == jax.tree.structure(theirs.params)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def assert_learned(output):
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] / 2


@pytest.mark.usefixtures("standard_promotion")
def test_train_step_learns_on_one_page(capsys):
    load("train_step.py").main([])
    output = capsys.readouterr().out
    assert output.startswith("chip: cpu\n")
    assert output.count("warning: ") == 1  # CPUs have no FP8 matmuls
    assert_learned(output)
    assert "scales of x, w and g:" in output  # delayed() has a state
    assert len((EXAMPLES / "train_step.py").read_text().splitlines()) <= 85


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_train_step_learns_as_a_script(tmp_path, recipe):
    finished = run("train_step.py", recipe, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert_learned(finished.stdout)


@pytest.mark.slow
def test_the_default_run_meets_its_marks(tmp_path):
    start = time.perf_counter()
    finished = run("train_gpt.py", "--json", "result.json", cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["bf16_val_loss"] <= 2.5
    assert abs(result["val_loss"] - result["bf16_val_loss"]) <= 0.01
    assert seconds < 180
