"""40 steps of delayed scaling against the rules written out, bit for bit."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8 as fp8
from jaxfp8.quantizers import Delayed, RowState

STEPS = 40


def traces() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    smooth = np.exp(random.normal(0, 0.3, STEPS).cumsum())
    jumps = smooth.copy()
    jumps[10:20] *= 100
    jumps[20:] /= 100
    bad = smooth.copy()
    bad[[0, 3, 4, 17]], bad[[5, 6, 30]] = np.inf, np.nan
    tiny = random.choice([2e-38, 1e-38, 0.0, 1.2e-38, 1.17e-38, 1e-45, 1.3e-36], STEPS)
    late = np.where(np.arange(STEPS) < 25, 0.0, smooth)
    everything = random.choice(
        [0.0, np.inf, np.nan, 2e-38, 1e-38, 3.0, 300.0, 0.03, 448.0, oracle.FLOAT32_MAX], STEPS
    )
    powers = np.ldexp(448.0, random.integers(-100, 100, STEPS)) * random.choice(
        [1, 1 - 2**-24, 1 + 2**-23], STEPS
    )
    return {
        "smooth": smooth,
        "jumps": jumps,
        "bad": bad,
        "tiny": tiny,
        "zeros": np.zeros(STEPS),
        "late": late,
        "everything": everything,
        "powers": powers,
    }


TRACES = np.stack([*traces().values()], axis=1).astype(np.float32)  # [step, trace]
NAMES = [*traces()]
N = len(NAMES)


def expected(amaxes, *settings) -> RowState:
    """Scales, histories and counts after every step, [step, trace, ...]."""
    rows = [oracle.DelayedRow(*settings) for _ in range(N)]
    seen = []
    for amaxes_of_step in amaxes:
        for row, amax in zip(rows, amaxes_of_step, strict=True):
            row.step(float(amax))
        seen.append(
            (
                [row.scale for row in rows],
                [list(row.history) for row in rows],
                [row.nonfinite_steps for row in rows],
            )
        )
    return RowState(*(np.array(field, np.float32) for field in zip(*seen, strict=True)))


def assert_same(actual, exact, message=""):
    for field in RowState._fields:
        np.testing.assert_array_equal(
            getattr(actual, field), getattr(exact, field), err_msg=f"{field} {message}", strict=True
        )


def start(*leading, history_length) -> RowState:
    return RowState(jnp.zeros(leading), jnp.zeros((*leading, history_length)), jnp.zeros(leading))


# Of the length of the history, the algorithm, the margin and powers of two: each pair once.
PAIRS = {
    (1, "max", 0, False),
    (1, "most_recent", 2, True),
    (4, "max", 2, True),
    (4, "most_recent", 0, False),
    (4, "most_recent", 0, True),
    (16, "max", 0, True),
    (16, "most_recent", 2, False),
}
SETTINGS = [
    pytest.param(*row, marks=() if row in PAIRS else pytest.mark.slow)
    for row in itertools.product((1, 4, 16), ("max", "most_recent"), (0, 2), (False, True))
]


@pytest.mark.parametrize(("history_length", "algorithm", "margin", "power_of_two"), SETTINGS)
def test_update_in_a_scan(history_length, algorithm, margin, power_of_two):
    quantizer = Delayed(
        format=fp8.E4M3,
        history_length=history_length,
        algorithm=algorithm,
        margin=margin,
        power_of_two=power_of_two,
    )
    step = lambda row, amax: (quantizer.update(row, amax),) * 2
    _, rows = jax.lax.scan(step, start(N, history_length=history_length), TRACES)
    assert_same(
        rows,
        expected(TRACES, "E4M3", history_length, algorithm, margin, power_of_two),
        f"of {NAMES}",
    )


@pytest.mark.parametrize(
    ("history_length", "algorithm", "margin", "power_of_two"),
    [
        (4, "max", 2, True),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ((1, "max", 0, False), (16, "most_recent", 0, False))
        ),
    ],
)
def test_update_eagerly(history_length, algorithm, margin, power_of_two):
    quantizer = Delayed(
        format=fp8.E4M3,
        history_length=history_length,
        algorithm=algorithm,
        margin=margin,
        power_of_two=power_of_two,
    )
    exact = expected(TRACES, "E4M3", history_length, algorithm, margin, power_of_two)
    row = start(N, history_length=history_length)
    for step, amax in enumerate(TRACES):
        row = quantizer.update(row, jnp.asarray(amax))
        assert_same(row, jax.tree.map(lambda leaf, step=step: leaf[step], exact), f"step {step}")


@pytest.mark.parametrize("leading", [(), (2, N // 2)], ids=str)
def test_update_of_stacked_rows(leading):
    quantizer = Delayed(format=fp8.E5M2, history_length=4)
    amaxes = (
        TRACES[:, NAMES.index("everything")] if not leading else TRACES.reshape(STEPS, *leading)
    )
    update = jax.jit(quantizer.update)
    row = start(*leading, history_length=4)
    for amax in amaxes:
        row = update(row, jnp.asarray(amax))
    exact = jax.tree.map(lambda leaf: leaf[-1], expected(TRACES, "E5M2", 4, "max", 0, False))
    if leading:
        exact = jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), exact)
    else:
        exact = jax.tree.map(lambda leaf: leaf[NAMES.index("everything")], exact)
    assert_same(row, exact)


@pytest.mark.parametrize(
    ("history_length", "algorithm", "margin", "power_of_two"),
    [
        (4, "most_recent", 2, True),
        (16, "max", 2, False),
        pytest.param(1, "max", 0, False, marks=pytest.mark.slow),
        pytest.param(16, "max", 0, True, marks=pytest.mark.slow),
    ],
)
def test_commit(history_length, algorithm, margin, power_of_two):
    recipe = fp8.recipes.delayed(
        history_length=history_length, algorithm=algorithm, margin=margin, power_of_two=power_of_two
    )
    # Layers are stacked along the first axis; x, w and g of a layer see different traces.
    amaxes = np.stack([np.roll(TRACES, shift, axis=1) for shift in range(3)], axis=-1)
    state = jax.vmap(lambda _: fp8.init_state(recipe))(jnp.zeros(N))
    nothing = fp8.nothing_seen(state)

    def step(state, amax):
        # Two microbatches, one of which saw less.
        halves = [dataclasses.replace(nothing, amax=a) for a in (amax, amax * 0.5)]
        state = fp8.commit(state, fp8.merge_seen(*halves))
        return state, (state.scale, state.amax_history, state.nonfinite_steps)

    _, seen = jax.lax.scan(step, state, amaxes)
    for r, format in enumerate(("E4M3", "E4M3", "E5M2")):
        exact = expected(amaxes[..., r], format, history_length, algorithm, margin, power_of_two)
        assert_same(
            RowState(seen[0][..., r], seen[1][..., r, :], seen[2][..., r]), exact, f"row {r}"
        )


def test_a_step_that_saw_nothing_leaves_the_state_bit_for_bit():
    quantizer = Delayed(format=fp8.E4M3, history_length=4)
    row = RowState(jnp.float32(0.1), jnp.array([0.0, 3.0, 2.0, 1.0]), jnp.float32(5.0))
    for amax in (0.0, 1e-38):
        for new, old in zip(quantizer.update(row, jnp.float32(amax)), row, strict=True):
            np.testing.assert_array_equal(new, old)


def test_an_inf_does_not_freeze_the_scale():
    # In TransformerEngine's JAX half one inf keeps the scale for as long as it stays in the window.
    quantizer = Delayed(format=fp8.E4M3, history_length=16)
    row = start(history_length=16)
    for amax in (1.0, np.inf, 2.0):
        row = quantizer.update(row, jnp.float32(amax))
    assert row.scale == oracle.inverse(oracle.multiplier(2.0, "E4M3"))
    assert np.isfinite(row.amax_history).all()


def test_state_is_float32_in_64_bit_mode_too():
    recipe = fp8.recipes.delayed(history_length=4)
    with jax.enable_x64(True):
        state = fp8.init_state(recipe)
        x, w = jnp.ones((2, 4)), jnp.full((4, 3), 3.0)
        assert x.dtype == jnp.float64
        loss = lambda w, state: fp8.dot(x, w, recipe=recipe, state=state).sum()
        _, gradient, new = jax.jit(fp8.value_and_grad(loss))(w, state)
        assert gradient.dtype == jnp.float64
        assert {leaf.dtype for leaf in jax.tree.leaves((state, new))} == {jnp.dtype("float32")}
        np.testing.assert_array_equal(new.amax_history[:, -1], [1.0, 3.0, 1.0])


@pytest.mark.parametrize(
    ("algorithm", "history", "passes"),
    [
        ("max", [0, 0, 448], False),
        ("max", [0, 448, 448], True),  # a larger amax may have been rotated out just now
        ("most_recent", [0, 448, 448], False),
    ],
)
def test_a_scale_may_be_larger_than_a_full_history_gives(algorithm, history, passes):
    delayed = Delayed(format=fp8.E4M3, history_length=3, algorithm=algorithm)
    row = np.float32([history])
    count = np.zeros(1, np.float32)
    assert delayed.faults(RowState(np.float32([1]), row, count)) == []
    found = delayed.faults(RowState(np.float32([2]), row, count))
    assert [fault.leaf for fault in found] == ([] if passes else ["scale"])
