"""Converted nnx models: a copy that shares the Variables, with the matmuls of our layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from same_bits import assert_same_bits
from zoo import NNXLM, RECIPES, TOKENS, VOCABULARY, WIDTH

import jaxfp8 as fp8


def loss_of(model, tokens):
    logits = model(tokens)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])


def made(**fields):
    """An `NNXLM`, in one program: eagerly each parameter is several."""
    return nnx.jit(lambda: NNXLM(nnx.Rngs(0), **fields))()


apply = nnx.jit(lambda model, tokens: model(tokens))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("recipe", "scan"),
    [
        ("delayed", True),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("delayed", "blockwise")),
        pytest.param("blockwise", True, marks=pytest.mark.slow),
    ],
)
def test_a_converted_model_trains(recipe, scan):
    depth = 3 if scan else 2
    model = made(scan=scan, depth=depth, attention=not scan)
    mine, coverage = fp8.convert(model, RECIPES[recipe], inputs=(TOKENS,))
    assert coverage["head"].reason == "kept: lm_head"
    assert coverage["mix"].recipe == recipe
    assert 0.6 < coverage.share < 1
    loss, grads = nnx.jit(fp8.nnx.value_and_grad(loss_of))(mine, TOKENS)
    want, exact = nnx.jit(nnx.value_and_grad(loss_of))(model, TOKENS)
    assert loss != want
    np.testing.assert_allclose(loss, want, rtol=0.03)
    assert jax.tree.structure(nnx.to_pure_dict(grads)) == jax.tree.structure(
        nnx.to_pure_dict(exact)
    )
    states = jax.tree.leaves(
        nnx.state(mine, fp8.nnx.FP8State), is_leaf=lambda n: hasattr(n, "rows")
    )
    assert len(states) == (0 if recipe == "blockwise" else 3 if scan else 13)
    assert sum(state.scale.ndim == 2 for state in states) == (2 if scan and states else 0)
    for state in states:
        assert state.scale.shape == ((3, 3) if scan and state.scale.ndim == 2 else (3,))
        assert (state.amax_history[..., -1] > 0).all()


def test_parameters_are_shared_and_the_model_stays_as_it_was():
    model = made(depth=1, attention=False)
    before = nnx.graphdef(model)
    exact = apply(model, TOKENS)
    mine, _ = fp8.convert(model, RECIPES["current"], inputs=(TOKENS,))
    assert nnx.graphdef(model) == before
    assert_same_bits(apply(model, TOKENS), exact)
    assert np.any(np.asarray(apply(mine, TOKENS)) != np.asarray(exact))
    mine.head.kernel[...] = np.zeros((WIDTH, VOCABULARY), np.float32)
    assert np.all(np.asarray(model.head.kernel[...]) == 0)
    paths = [
        [path for path, _ in nnx.to_flat_state(nnx.state(each, nnx.Param))]
        for each in (mine, model)
    ]
    assert paths[0] == paths[1]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=name, marks=() if recipe.rows else pytest.mark.slow)
        for name, recipe in RECIPES.items()
    ],
)
def test_program_and_results_are_those_of_layers_by_hand(recipe):
    class Net(nnx.Module):
        def __init__(self, linear, general, einsum, rngs):
            self.up = linear(WIDTH, 64, rngs=rngs)
            self.out = general(64, (4, 8), rngs=rngs)
            self.mix = einsum("bhk,hkd->bd", (4, 8, WIDTH), (WIDTH,), rngs=rngs)

        def __call__(self, x):
            return self.mix(self.out(nnx.relu(self.up(x))))

    def ours(layer):
        return lambda *a, **k: layer(*a, recipe=recipe, **k)

    layers = (fp8.nnx.FP8Linear, fp8.nnx.FP8LinearGeneral, fp8.nnx.FP8Einsum)
    by_hand = Net(*map(ours, layers), nnx.Rngs(0))
    plain = Net(nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (16, WIDTH))
    by_rules, _ = fp8.convert(plain, recipe)
    assert nnx.graphdef(by_rules) == nnx.graphdef(by_hand)
    step = fp8.nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))

    def pure(state, x):
        model = nnx.merge(graphdef, state)
        return step(model, x), nnx.state(model)

    graphdef = nnx.graphdef(by_hand)
    programs = [jax.jit(pure).lower(nnx.state(m), x).as_text() for m in (by_rules, by_hand)]
    assert programs[0] == programs[1]
    step = nnx.jit(step)
    assert_same_bits(step(by_rules, x), step(by_hand, x))
    assert_same_bits(nnx.state(by_rules), nnx.state(by_hand))


def test_without_an_example_call_shapes_are_those_of_kernels():
    model = made(scan=True, attention=False)
    mine, coverage = fp8.convert(model, RECIPES["delayed"])
    assert coverage["blocks/up"].shape == (1, WIDTH, 64)
    assert coverage["embedding"].reason == "an embedding, a lookup"
    assert str(coverage).endswith("layers that can, each called once (no inputs)")
    assert np.isfinite(apply(mine, TOKENS)).all()


def test_an_abstract_model_is_converted_before_its_checkpoint_is_loaded():
    model = nnx.eval_shape(lambda: NNXLM(nnx.Rngs(0), depth=1, attention=False))
    mine, coverage = fp8.convert(model, RECIPES["delayed"], inputs=(TOKENS,))
    nnx.update(mine, nnx.state(made(depth=1, attention=False)))
    loss, _ = nnx.jit(fp8.nnx.value_and_grad(loss_of))(mine, TOKENS)
    assert np.isfinite(loss)
    assert coverage["mix"].recipe == "delayed"


def test_a_shared_layer_has_one_state():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.again = self.first

        def __call__(self, x):
            return self.again(nnx.relu(self.first(x)))

    x = jnp.ones((4, WIDTH))
    mine, coverage = fp8.convert(Twice(nnx.Rngs(0)), RECIPES["delayed"], inputs=(x,))
    assert mine.first is mine.again
    assert len(coverage) == 1
    assert coverage.share == 1
    assert coverage.flops == 2 * 2 * 4 * WIDTH * WIDTH


def test_a_tied_head_is_converted_if_asked():
    model = made(tied=True, depth=1, attention=False)
    kept, coverage = fp8.convert(model, RECIPES["delayed"], inputs=(TOKENS,))
    assert coverage["embedding"].reason == "kept: lm_head"
    assert type(kept.embedding) is nnx.Embed
    mine, coverage = fp8.convert(model, RECIPES["delayed"], inputs=(TOKENS,), keep=())
    assert coverage["embedding"].recipe == "delayed"
    nnx.jit(fp8.nnx.value_and_grad(loss_of))(mine, TOKENS)
    state = mine.embedding.dot_general.state.get_value()
    largest = np.abs(np.asarray(model.embedding.embedding[...])).max()
    assert np.asarray(state.amax_history)[1, -1] == largest


class Scaled(nnx.Embed):
    """As in flax's examples/gemma."""

    def __call__(self, tokens):
        return 2 * super().__call__(tokens)


def test_a_tied_head_of_a_subclass():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embedding = Scaled(VOCABULARY, WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, tokens):
            return self.embedding.attend(self.up(self.embedding(tokens)))

    model = Tied(nnx.Rngs(0))
    kept, coverage = fp8.convert(model, RECIPES["current"], inputs=(TOKENS,))
    assert coverage["embedding"].reason == "kept: lm_head"
    assert coverage.other_flops == 0
    assert type(kept.embedding) is Scaled
    mine, coverage = fp8.convert(model, RECIPES["current"], inputs=(TOKENS,), keep=())
    assert coverage.share == 1
    assert isinstance(mine.embedding, Scaled)
    assert_same_bits(mine.embedding(TOKENS), model.embedding(TOKENS))
    assert (mine(TOKENS) != kept(TOKENS)).any()


class Own(nnx.Module):
    def __init__(self, n, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, n)) * 0.1)

    def __call__(self, x):
        return jnp.einsum("...d,df->...f", x, self.w[...])


def test_layers_of_others():
    x = jax.random.normal(jax.random.key(0), (4, WIDTH))
    model = nnx.Sequential(Own(WIDTH, nnx.Rngs(0)), nnx.relu, Own(WIDTH, nnx.Rngs(1)))
    layers = {Own: lambda layer, einsum, x: einsum("...d,df->...f", x, layer.w[...])}
    mine, coverage = fp8.convert(model, RECIPES["current"], inputs=(x,), layers=layers)
    assert coverage.share == 1
    y = x
    for layer in (model.layers[0], model.layers[2]):
        y = fp8.dot(nnx.relu(y) if y is not x else y, layer.w[...], recipe=RECIPES["current"])
    assert_same_bits(mine(x), y)
    assert isinstance(mine.layers[0], Own)
    with pytest.raises(ValueError, match=r"(?s)no layer .*only a call shows its size, so inputs="):
        fp8.convert(model, RECIPES["current"], layers=layers)


def test_stochastic_rounding_needs_rngs():
    recipe = fp8.recipes.current(gradient_rounding="stochastic")
    model = made(depth=1, attention=False)
    with pytest.raises(ValueError, match="rngs=None, but recipe 'current' rounds stochastically"):
        fp8.convert(model, recipe, inputs=(TOKENS,))
    mine, _ = fp8.convert(model, recipe, inputs=(TOKENS,), rngs=nnx.Rngs(0, fp8=1))
    step = nnx.jit(fp8.nnx.value_and_grad(loss_of))
    grads = [step(mine, TOKENS)[1] for _ in range(2)]
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, jax.device_get(grads)), strict=True)
    )  # another key at each step
    with pytest.raises(ValueError, match=r"layer 'blocks/.*' is a stack of \[3\] layers"):
        fp8.convert(
            nnx.eval_shape(lambda: NNXLM(nnx.Rngs(0), scan=True, attention=False)),
            recipe,
            inputs=(TOKENS,),
            rngs=nnx.Rngs(0, fp8=1),
        )


def test_subclasses_of_flax_s_layers_stay_what_they_are():
    x = jax.random.normal(jax.random.key(0), (4, WIDTH))
    layer = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer)
    mine, coverage = fp8.convert(model, RECIPES["current"], inputs=(x,), rules=[(".*lora.*", None)])
    assert type(mine.layers[0]) is nnx.LoRALinear
    assert coverage["layers/0"].recipe == "current"
    assert coverage["layers/0/lora/lora_a"].reason == "rule '.*lora.*'"
    want = fp8.dot(x, layer.kernel[...], recipe=RECIPES["current"]) + layer.lora(x)
    np.testing.assert_allclose(mine(x), want, rtol=1e-6)


def test_a_subclass_with_a_matmul_of_its_own_is_read():
    class Own(nnx.Linear):
        """A subclass that does not call `dot_general`, so its code is read."""

        def __call__(self, x):
            return x @ self.kernel[...]

    model = nnx.Sequential(
        nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), Own(WIDTH, 8, rngs=nnx.Rngs(0))
    )
    _, coverage = fp8.convert(model, RECIPES["current"], inputs=(jnp.ones((4, WIDTH)),))
    assert [row.path for row in coverage] == ["layers/0", "layers/1/kernel"]
    assert coverage["layers/1/kernel"].type == "Own"
    assert coverage.share == 1


def test_a_model_with_fp8_layers_of_its_own():
    model = nnx.Sequential(
        nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)),
        fp8.nnx.FP8Linear(WIDTH, WIDTH, recipe=RECIPES["delayed"], rngs=nnx.Rngs(1)),
    )
    mine, coverage = fp8.convert(model, RECIPES["blockwise"], inputs=(jnp.ones((4, WIDTH)),))
    assert coverage["layers/1"].reason == "an FP8 layer already"
    assert mine.layers[0].dot_general.recipe == RECIPES["blockwise"]
    assert mine.layers[1].dot_general.recipe == RECIPES["delayed"]


def test_matmuls_that_a_model_hides_in_an_attribute():
    class Hidden(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.forward = self.run

        def run(self, x):
            return self.up(x)

        def __call__(self, x):
            return self.forward(x)

    with pytest.raises(ValueError, match="inputs= call no matmul of the layers"):
        fp8.convert(Hidden(), RECIPES["current"], inputs=(jnp.ones((4, WIDTH)),))


def test_an_einsum_with_dots_in_its_kernel():
    layer = nnx.Einsum("...bd,...dk->...bk", (2, WIDTH, 8), rngs=nnx.Rngs(0))
    _, coverage = fp8.convert(layer, RECIPES["current"], inputs=(jnp.ones((2, 4, WIDTH)),))
    assert coverage[""].shape == (4, WIDTH, 8)
    assert coverage.share == 1
