"""A user's own quantizer with state, in training; what is wrong with one is said.

`tests/contracts/test_transform_matrix.py` takes the same one through layers and transformations.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from contracts import own_quantizer
from contracts.own_quantizer import Smoothed
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.quantizers import AbstractQuantizer, KnownScale, RowState


def operands(quantizer):
    return fp8.recipes.Operands(lhs=quantizer, rhs=quantizer)


def in_recipe(quantizer):
    pair = operands(quantizer)
    return fp8.Recipe(name="own", fprop=pair, dgrad=pair, wgrad=pair)


def test_its_scales_follow_its_own_rule_over_steps():
    recipe = own_quantizer.recipe()
    state, w = fp8.init_state(recipe), jnp.eye(4)
    assert state.amax_history.shape == (3, 1)
    step = jax.jit(fp8.value_and_grad(lambda w, s, x: fp8.dot(x, w, recipe=recipe, state=s).sum()))
    means = np.zeros(3, np.float32)
    for largest in (8.0, 2.0, 32.0):
        _, _, state = step(w, state, jnp.full((4, 4), largest))
        seen, decay = np.float32([largest, 1, 1]), np.float32([0.5, 0.5, 0.25])
        means = np.where(means > 0, decay * means + (1 - decay) * seen, seen)
        np.testing.assert_array_equal(state.amax_history[:, 0], means)
        np.testing.assert_allclose(state.scale, means / np.float32([448, 448, 57344]), rtol=1e-6)


def test_its_scale_is_the_one_that_casts():
    """The second step's cast takes the smoothed scale: a value above its range saturates."""
    recipe = own_quantizer.recipe()
    state = fp8.commit(fp8.init_state(recipe), own_seen(recipe, 1.0))
    y = fp8.dot(jnp.full((1, 1), 100.0), jnp.ones((1, 1)), recipe=recipe, state=state)
    np.testing.assert_allclose(y, 1.0, rtol=1e-6)  # 448 * (1 / 448)


def own_seen(recipe, amax):
    seen = fp8.nothing_seen(fp8.init_state(recipe))
    return dataclasses.replace(seen, amax=jnp.full_like(seen.amax, amax))


def test_it_survives_a_file_and_a_bad_file_is_found():
    model = FP8Dense(4, recipe=own_quantizer.recipe())
    like = model.init(jax.random.key(0), jnp.ones((2, 4)))[COLLECTION]
    saved = jax.tree.map(
        np.asarray,
        fp8.commit(
            like,
            jax.tree.map(
                lambda _: own_seen(model.recipe, 3.0),
                like,
                is_leaf=lambda n: isinstance(n, fp8.state.MatmulState),
            ),
        ),
    )
    checked = fp8.check_state(saved, like)
    for got, want in zip(jax.tree.leaves(checked), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(got, want)
    is_state = lambda node: isinstance(node, fp8.state.MatmulState)
    spoil = lambda state: dataclasses.replace(state, scale=np.full_like(state.scale, np.nan))
    broken = jax.tree.map(spoil, saved, is_leaf=is_state)
    with pytest.raises(fp8.FP8StateError, match=mentions("scale", "nan", "Smoothed")):
        fp8.check_state(broken, like)


def test_a_start_that_is_calibrated():
    """`init` may set the scale, so that the first step does not look at its own amax."""

    @dataclasses.dataclass(frozen=True)
    class Calibrated(Smoothed):
        first: float = 0.5

        def init(self):
            return super().init()._replace(scale=self.first)  # a Python number

    x = fp8.recipes.Operands(lhs=Calibrated(), rhs=Smoothed())
    recipe = fp8.Recipe(name="own", fprop=x, dgrad=operands(Smoothed()), wgrad=x)
    state = fp8.init_state(recipe)
    np.testing.assert_array_equal(state.scale, np.float32([0.5, 0, 0]), strict=True)
    y = fp8.dot(
        jnp.full((1, 1), 1e6), jnp.ones((1, 1)), recipe=recipe, state=fp8.init_state(recipe)
    )
    np.testing.assert_allclose(y, 224.0, rtol=1e-6)  # 448 * 0.5: saturated by the scale of init


def test_a_scale_may_depend_on_the_whole_tensor():
    """As two-level scales will: the amax of a row, and that of all of them."""

    @dataclasses.dataclass(frozen=True)
    class AtLeast(AbstractQuantizer):
        value_format: fp8.quantizers.Format = fp8.E4M3
        granularity: fp8.quantizers.PerRow = fp8.quantizers.PerRow()

        def choose_scale(self, inputs, granularity):
            least = inputs.amax(fp8.PerTensor()) / 2
            return self.scale_of_amax(jnp.maximum(inputs.amax(granularity), least))

    x = jnp.array([[448.0, 1.0], [0.4, 0.1]])
    y = fp8.dot(x, jnp.eye(2), recipe=in_recipe(AtLeast()))
    # The second row is cast with the scale of 224, 0.5, and not with that of 0.4.
    want = fp8.quantize(x[1], fp8.E4M3, scale=0.5).dequantize()
    np.testing.assert_allclose(y[1], want, rtol=1e-6)


class NoDataclass(AbstractQuantizer):
    granularity = fp8.PerTensor()
    value_format = fp8.E4M3


@dataclasses.dataclass
class NotFrozen(AbstractQuantizer):
    granularity: fp8.PerTensor = fp8.PerTensor()
    value_format: fp8.quantizers.Format = fp8.E4M3


@dataclasses.dataclass(frozen=True)
class NoUpdate(AbstractQuantizer):
    stateful = True
    granularity: fp8.PerTensor = fp8.PerTensor()
    value_format: fp8.quantizers.Format = fp8.E4M3


@dataclasses.dataclass(frozen=True)
class OddRow(Smoothed):
    def init(self):
        return RowState(np.float32(0), np.zeros(5, np.float32), np.float32(0))


@dataclasses.dataclass(frozen=True)
class InRows(Smoothed):
    granularity: fp8.quantizers.PerRow = fp8.quantizers.PerRow()


@dataclasses.dataclass(frozen=True)
class Ignored(Smoothed):
    room: float = dataclasses.field(default=1.0, compare=False)


@dataclasses.dataclass(frozen=True)
class OfAFunction(Smoothed):
    function: object = lambda: 0


KNOWN = {
    "dtype": KnownScale(np.asarray(1, ml_dtypes.bfloat16), np.float32(1)),
    "shape": KnownScale(np.float32([1]), np.float32([1])),
    "no arrays": KnownScale(1.0, 1.0),
    "a number": 2.0,
}


@dataclasses.dataclass(frozen=True)
class Returns(Smoothed):
    """Its methods return what they are told to."""

    new: tuple = ()
    known: str = ""

    def update(self, row, amax):
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in self.new)

    def choose_scale(self, inputs, granularity):
        return KNOWN[self.known]


def committed(**how):
    recipe = in_recipe(Returns(**how))
    state = fp8.init_state(recipe)
    return fp8.commit(state, fp8.nothing_seen(state))


def multiplied(known):
    recipe = in_recipe(Returns(known=known))
    return fp8.dot(jnp.ones((2, 2)), jnp.ones((2, 2)), recipe=recipe, state=fp8.init_state(recipe))


MISTAKES = {
    "no dataclass": (
        TypeError,
        lambda: operands(NoDataclass()),
        ("lhs", "NoDataclass", "frozen=True"),
    ),
    "not frozen": (TypeError, lambda: operands(NotFrozen()), ("lhs", "NotFrozen", "frozen=True")),
    "no update": (
        TypeError,
        lambda: operands(NoUpdate()),
        ("lhs", "NoUpdate", "update(row, amax)"),
    ),
    "rows": (
        ValueError,
        lambda: operands(InRows()),
        ("lhs", "InRows", "PerRow()", "use PerTensor()"),
    ),
    "a field that does not compare": (
        TypeError,
        lambda: operands(Ignored()),
        ("lhs", "Ignored", "['room']", "leave compare=False out"),
    ),
    "a list": (
        TypeError,
        lambda: operands(Smoothed(decay=[0.5])),
        ("lhs", "Smoothed", "unhashable type: 'list'", "a tuple"),
    ),
    "a function": (
        TypeError,
        lambda: in_recipe(OfAFunction(function=lambda: 1)),
        ("quantizer of x", "OfAFunction", "memory address", "a repr of its own"),
    ),
    "no history": (
        ValueError,
        lambda: operands(
            dataclasses.make_dataclass(
                "Odd", [("history_length", float, 4.0)], bases=(Smoothed,), frozen=True
            )()
        ),
        ("lhs", "Odd", "history_length=4.0", "an integer of at least 1"),
    ),
    "update, nothing": (
        fp8.FP8StateError,
        lambda: committed(new=()),
        ("Returns.update returned []", "RowState", "[[3], [3, 1], [3]]"),
    ),
    "update, dtype": (
        fp8.FP8StateError,
        lambda: committed(new=(((3,), "bfloat16"), ((3, 1), "float32"), ((3,), "float32"))),
        ("Returns.update returned", "bfloat16", "float32 arrays"),
    ),
    "scale, dtype": (
        ValueError,
        lambda: multiplied("dtype"),
        ("Returns chose the scale", "bfloat16", "must be a KnownScale", "of shape []"),
    ),
    "scale, shape": (
        ValueError,
        lambda: multiplied("shape"),
        ("Returns chose the scale", "[1.]", "of shape []"),
    ),
    "scale, no arrays": (
        ValueError,
        lambda: multiplied("no arrays"),
        ("Returns chose the scale", "multiplier=1.0", "both arrays of shape []"),
    ),
    "scale, a number": (
        ValueError,
        lambda: multiplied("a number"),
        ("Returns chose the scale 2.0", "must be a KnownScale"),
    ),
    "init": (
        ValueError,
        lambda: fp8.init_state(in_recipe(OddRow())),
        ("OddRow.init()", "(5,)", "history_length=1", "(1,)"),
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case):
    error, call, words = MISTAKES[case]
    with pytest.raises(error, match=mentions(*words)):
        call()
