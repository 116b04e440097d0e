"""Timings: which backend they choose, and that they are measured, saved and loaded whole."""

import dataclasses
import functools
import importlib.metadata
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from interpreter import needs_mosaic

import jaxfp8 as fp8
from jaxfp8._geometry import Geometry
from jaxfp8.kernels import _timings
from jaxfp8.kernels._timings import Time, Way, describe
from jaxfp8.kernels.scaled_matmul import _api
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul.hopper._tiling import CHOICES, search_space
from jaxfp8.plan import _autotune
from jaxfp8.plan._autotune import _Recorder

M, K, N = 8, 256, 24
RECIPE = fp8.recipes.blockwise()
CALL = MatmulCall(
    geometry=Geometry.of((((1,), (0,)), ((), ())), 2, 2), out_dtype=jnp.dtype(jnp.float32)
)


quantize = jax.jit(fp8.quantize, static_argnums=(1, 2))


@functools.cache
def operands(m=M, k=K, n=N):
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((m, k), (k, n)))
    return quantize(x, fp8.E4M3, fp8.PerBlock((1, 128))), quantize(
        w, fp8.E4M3, fp8.PerBlock((128, 128))
    )


def time(backend, seconds, tiling=None):
    return Time(
        way=Way(backend=backend, tiling=tiling),
        seconds=seconds,
        quartiles=(seconds / 2, 2 * seconds),
    )


def table(*times, matmul=None, chip="h200"):
    matmul = describe(*operands(), CALL) if matmul is None else matmul
    return fp8.plan.Timings(
        chip=chip, device="a GPU", versions=(("jax", "1"),), times=((matmul, times),)
    )


def runs(monkeypatch, name, function):
    """Replace what a backend runs, on every platform. Its only tiling is None."""
    row = _api.BACKENDS[name]
    changed = dataclasses.replace(row, function=function, elsewhere=None, tilings=lambda: (None,))
    monkeypatch.setitem(_api.BACKENDS, name, changed)


@pytest.fixture
def called(monkeypatch):
    """The backends of a matmul, in the order in which they are called; "mosaic" cannot."""
    names = []

    def spy(name, backend, *args, tiling=None, **kwargs):
        names.append((name, tiling))
        if name == "mosaic":
            raise NotImplementedError("not here")
        return backend(*args, **kwargs)

    for name, backend in _api.BACKENDS.items():
        runs(monkeypatch, name, functools.partial(spy, name, backend))
    return names


def test_the_fastest_that_can(called):
    large = CHOICES["large"]
    timings = table(time("xla", 3.0), time("mosaic", 1.0, large), time("reference", 2.0))
    kernels = fp8.Kernels("h200", timings=timings)
    multiply = lambda lhs, rhs: fp8.scaled_matmul(
        lhs, rhs, preferred_element_type=jnp.float32, kernels=kernels
    )
    jax.eval_shape(multiply, *operands())
    assert called == [("mosaic", large), ("reference", None)]
    called.clear()
    c = jax.ShapeDtypeStruct((M, N), jnp.float32)  # for which that tiling may have no room
    jax.eval_shape(lambda c: fp8.scaled_matmul(*operands(), add_to=c, kernels=kernels), c)
    assert called == [("mosaic", None), ("reference", None)]
    row = describe(*operands(), CALL)
    lhs, rhs = "e4m3[8,256] 1x128 float32", "e4m3[256,24] 128x128 float32"
    assert row == f"{lhs} @ {rhs}, contracting 1 with 0 -> float32"
    assert timings.fastest(row) == Way(backend="mosaic", tiling=large)


def test_another_matmul_is_done_as_by_none(called):
    timings = table(time("reference", 1.0))
    kernels = fp8.Kernels("h200", timings=timings)

    def trace(*operands, **options):
        jax.eval_shape(
            lambda lhs, rhs: fp8.scaled_matmul(lhs, rhs, kernels=kernels, **options),
            *operands,
        )

    for lhs, rhs in (operands(m=M + 1), operands(k=K + 128), operands(n=N + 1)):
        trace(lhs, rhs)
    trace(*operands(), preferred_element_type=jnp.bfloat16)
    trace(*operands(), fast_accumulation=True)
    assert ("reference", None) not in called
    trace(*operands())
    assert called[-1] == ("reference", None)
    assert timings.fastest("another") is None


def test_a_layer_takes_them(called):
    x, w = jnp.ones((M, K)), jnp.ones((K, N))

    def loss(timings, x, w):
        kernels = fp8.Kernels("h200", casts="xla", timings=timings)
        return jnp.sum(fp8.dot(x, w, recipe=RECIPE, kernels=kernels))

    recorder = _Recorder()
    jax.eval_shape(functools.partial(loss, recorder), x, w)
    timings = table(time("reference", 1.0), matmul=next(iter(recorder.matmuls)))  # fprop alone
    called.clear()
    y, gradients = jax.jit(jax.value_and_grad(functools.partial(loss, timings), (0, 1)))(x, w)
    assert y == M * K * N
    assert called.count(("reference", None)) == 1
    assert called.count(("xla", None)) == 2
    np.testing.assert_array_equal(gradients[1], np.full((K, N), M))


def test_of_another_chip():
    timings = table(time("xla", 1.0))
    for chip in ("b200", None):
        wanted = mentions("timings are of chip 'h200'", f"{chip=}", "fp8.Kernels('h200', timings=")
        with pytest.raises(ValueError, match=wanted):
            fp8.Kernels(chip, timings=timings)
    with pytest.raises(ValueError, match="h300"):
        table(chip="h300")


def test_a_file_holds_all_of_them(tmp_path):
    timings = table(time("xla", 1.0), *(time("mosaic", 0.5, tiling) for tiling in CHOICES.values()))
    timings.save(tmp_path / "timings.json")
    loaded = fp8.plan.Timings.load(tmp_path / "timings.json")
    assert (loaded, hash(loaded)) == (timings, hash(timings))
    assert json.loads((tmp_path / "timings.json").read_text())["chip"] == "h200"
    assert "| mosaic rows=64 columns=32 beside=True" in str(loaded)
    assert str(loaded).count("\n|") == 2 + 1 + len(CHOICES)


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 0}'])
def test_another_file(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=mentions("other.json", "Timings.save")):
        fp8.plan.Timings.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chip", None),
        ("chip", "h300"),
        ("versions", []),
        ("times", "fast"),
        ("times", [{}]),
        ("times", [{"matmul": 1}]),
    ],
)
def test_a_file_that_was_edited(tmp_path, name, value):
    path = tmp_path / "timings.json"
    table(time("xla", 1.0)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=mentions("timings.json", "Timings.save")):
        fp8.plan.Timings.load(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tiling": {"depth": 1}}, {"tiling": {"rows": 64, "columns": 64}}, {"seconds": None},
        {"seconds": float("nan")}, {"quartiles": [1.0]}, {"backend": ["xla"]},
    ],
)  # fmt: skip
def test_a_time_that_was_edited(tmp_path, wrong):
    path = tmp_path / "timings.json"
    table(time("xla", 1.0)).save(path)
    plain = json.loads(path.read_text())
    plain["times"][0]["times"][0] |= wrong
    path.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=mentions("timings.json", "Timings.save")):
        fp8.plan.Timings.load(path)


@pytest.mark.parametrize("end", [0, 80])
def test_a_file_that_was_cut(tmp_path, end):
    path = tmp_path / "timings.json"
    table(time("xla", 1.0)).save(path)
    path.write_text(path.read_text()[:end])
    with pytest.raises(ValueError, match=mentions("timings.json", "Timings.save")):
        fp8.plan.Timings.load(path)


@pytest.mark.parametrize(
    ("product", "fault"),
    [
        ([1.0, np.nan], "inf or NaN"),
        ([1.0, np.inf], "inf or NaN"),
        ([1.0, 3.0], "differs from the product of xla"),
        ([1.0, 2.001], None),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_product_is_named(product, fault, first):
    way, products = Way(backend="mosaic", tiling=None), {"xla": np.float32([1, 2])}
    if first:  # there is nothing to compare with
        products = {}
    if fault is None or (first and "differs" in fault):
        _timings._check("a matmul", way, np.float32(product), products)
        assert set(products) >= {"mosaic"}
        return
    with pytest.raises(RuntimeError, match=mentions("mosaic", "a matmul", fault)):
        _timings._check("a matmul", way, np.float32(product), products)


def test_a_backend_that_is_no_more(called):
    """Timings of another version may name one. The next way is taken."""
    timings = table(time("reference", 2.0), time("fast", 1.0))
    kernels = fp8.Kernels("h200", timings=timings)
    jax.eval_shape(lambda: fp8.scaled_matmul(*operands(), kernels=kernels))
    assert called == [("reference", None)]


def test_timings_are_of_matmuls():
    timings = table(time("xla", 1.0))
    x = jnp.ones((2, 2))
    with pytest.raises(TypeError, match=mentions("kernels=Timings(", "Kernels are needed")):
        fp8.dot(x, x, recipe=RECIPE, kernels=timings)
    with pytest.raises(TypeError, match=mentions("kernels={'xla': 1}", "of type dict")):
        fp8.scaled_matmul(*operands(), kernels={"xla": 1})
    for wrong in ({"xla": 1}, fp8.plan.Timings, fp8.Kernels()):
        with pytest.raises(TypeError, match=mentions(f"timings={wrong!r}", "Timings.load(path)")):
            fp8.Kernels("h200", timings=wrong)
    for field in ("casts", "matmuls"):
        with pytest.raises(ValueError, match=mentions(f"{field}=Timings(", f"backend of {field}")):
            fp8.Kernels("h200", **{field: timings})
    with pytest.raises(ValueError, match=mentions("matmuls='xla' and timings", "Leave one out")):
        fp8.Kernels("h200", matmuls="xla", timings=timings)


def test_merged():
    first, second = table(time("xla", 1.0), matmul="a"), table(time("xla", 2.0), matmul="b")
    assert [name for name, _ in first.merged(second).times] == ["a", "b"]
    assert first.merged(table(time("xla", 3.0), matmul="a")).times[0][1][0].seconds == 3.0
    with pytest.raises(ValueError, match=mentions("chip='h200'", "'h100'")):
        first.merged(table(chip="h100"))


H200 = fp8.Kernels("h200")


def step(kernels, x, w):
    return fp8.dot(x, w, recipe=RECIPE, kernels=kernels)


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU, on which two backends are XLA's."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_timings, "_TURNS", 2)
    monkeypatch.setattr(_timings, "_MOST_SETS", 2)
    monkeypatch.setattr(_timings, "_ROUNDS", 3)
    monkeypatch.setattr(_timings, "_SECONDS", 0.0)
    runs(monkeypatch, "mosaic", _api.BACKENDS["xla"].function)
    return monkeypatch


TYPES = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (K, N))]


@pytest.mark.usefixtures("gpu")
def test_autotune_times_each_matmul_once():
    tuned = fp8.plan.autotune(step, *TYPES, kernels=H200)
    assert dataclasses.replace(tuned, timings=None) == H200
    timings = tuned.timings
    assert (timings.chip, timings.device) == ("h200", jax.devices()[0].device_kind)
    assert len(timings.times) == 1
    for _, times in timings.times:
        assert {time.way.backend for time in times} == {"xla", "mosaic"}
        assert all(0 < time.quartiles[0] <= time.seconds <= time.quartiles[1] for time in times)
    again = fp8.plan.autotune(step, *TYPES, kernels=tuned)
    assert again == tuned  # what is there is not timed again
    more = fp8.plan.autotune(
        step, *(jax.ShapeDtypeStruct(t.shape, jnp.float32) for t in TYPES), kernels=tuned
    ).timings
    assert more.times[:1] == timings.times
    assert len(more.times) == 2
    jax.eval_shape(functools.partial(step, tuned), *TYPES)


def test_autotune_of_a_checkout_that_is_not_installed(gpu):
    """It has no metadata with the version of jaxfp8."""

    def version(name):
        if name == "jaxfp8":
            raise importlib.metadata.PackageNotFoundError(name)
        return f"{name}'s"

    gpu.setattr(importlib.metadata, "version", version)
    gpu.setattr(_autotune, "measure", lambda *arguments: ())
    found = fp8.plan.autotune(step, *TYPES, kernels=H200).timings.versions
    assert dict(found) == {"jax": "jax's", "jaxlib": "jaxlib's", "jaxfp8": fp8.__version__}


@pytest.mark.usefixtures("gpu")
def test_autotune_keeps_the_casts():
    given = fp8.Kernels("h200", casts="reference")
    tuned = fp8.plan.autotune(step, *TYPES, kernels=given)
    assert dataclasses.replace(tuned, timings=None) == given


def test_autotune_refuses_a_wrong_product(gpu):
    xla = _api.BACKENDS["xla"]
    runs(gpu, "mosaic", lambda *args, **kwargs: 1.1 * xla(*args, **kwargs))
    with pytest.raises(RuntimeError, match="xla gives a wrong product"):
        fp8.plan.autotune(step, *TYPES, kernels=H200)


@pytest.mark.usefixtures("gpu")
def test_autotune_adds_to_timings_of_this_device_only():
    timings = dataclasses.replace(table(time("xla", 1.0)), device="another GPU")
    with pytest.raises(ValueError, match=mentions("'another GPU'", "do not compare")):
        fp8.plan.autotune(step, *TYPES, kernels=fp8.Kernels("h200", timings=timings))


def test_a_training_step_has_three_matmuls():
    recorder = _Recorder()
    loss = lambda x, w: jnp.sum(step(fp8.Kernels("h200", casts="xla", timings=recorder), x, w))
    jax.eval_shape(jax.grad(loss, (0, 1)), *TYPES)
    assert [matmul.split(" -> ")[0].split("contracting ")[1] for matmul in recorder.matmuls] == [
        "1 with 0", "1 with 1", "0 with 0"
    ]  # fmt: skip


@needs_mosaic
def test_every_tiling_that_there_is_room_for_is_tried(monkeypatch):
    found = list(_timings._ways(operands(), CALL, ("mosaic", "xla")))
    assert Way(backend="xla") in found
    assert {
        Way(backend="mosaic", tiling=CHOICES[name]) for name in ("decode", "few", "small", "large")
    } <= {*found}
    # its sums and products have no room together
    assert Way(backend="mosaic", tiling=CHOICES["wide"]) not in found
    assert list(_timings._ways(operands(), CALL, ("xla",))) == [Way(backend="xla")]

    def broken(*args, **kwargs):
        raise ValueError("a bug")

    row = dataclasses.replace(_api.BACKENDS["mosaic"], function=broken)
    monkeypatch.setitem(_api.BACKENDS, "mosaic", row)
    with pytest.raises(ValueError, match="a bug"):
        list(_timings._ways(operands(), CALL, ("mosaic", "xla")))


@pytest.mark.usefixtures("gpu")
def test_autotune_wants_a_matmul():
    with pytest.raises(ValueError, match=mentions("no FP8 matmul", "kernels=kernels")):
        fp8.plan.autotune(lambda kernels, x: x, TYPES[0], kernels=H200)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "kernels",
    [None, fp8.Kernels(), fp8.Kernels(casts="xla"), fp8.Kernels("h200", matmuls="xla")],
    ids=repr,
)
def test_autotune_wants_a_chip_and_no_backend(kernels):
    with pytest.raises(ValueError, match=mentions(f"kernels={kernels!r} must name the chip")):
        fp8.plan.autotune(step, *TYPES, kernels=kernels)


def test_autotune_wants_a_gpu():
    with pytest.raises(RuntimeError, match=mentions("times a GPU", "'cpu'")):
        fp8.plan.autotune(step, *TYPES, kernels=H200)


def test_a_loop_does_all_of_its_work():
    counted = []

    def work(x):
        jax.debug.callback(lambda: counted.append(1))
        return 2 * x

    sets = [(jnp.full(3, float(n)),) for n in range(3)]
    program = _timings._looped(work, sets[0])
    np.testing.assert_array_equal(jax.jit(program)(sets), np.full(3, 4.0))
    jax.effects_barrier()
    assert len(counted) == 3 * _timings._TURNS


def test_the_search_has_what_the_table_has():
    tilings = list(search_space())
    assert len(set(tilings)) == len(tilings) <= 48
    assert set(CHOICES.values()) <= set(tilings)
