"""Converted linen models that contain, transform or look at parts of themselves."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from same_bits import assert_same_bits
from zoo import KEY, LM, RECIPES, TOKENS, VOCABULARY, WIDTH, converted

import jaxfp8 as fp8
from jaxfp8.conversion._linen import _apart, _together
from jaxfp8.linen import COLLECTION


def small():
    """The smallest `LM` for tests that compile it."""
    return LM(depth=1, attention=False)


def test_jit_inside_of_a_model_keeps_no_program_of_another_model():
    """nn.jit keeps traces by the model's own fields, which conversion does not change."""
    model = LM("jit", 2, attention=False)
    variables = jax.eval_shape(model.init, KEY, TOKENS)
    program = lambda model: jax.jit(model.apply).lower(variables, TOKENS).as_text()
    exact = program(model)
    mine = converted(model, RECIPES["current"])
    first = program(mine)
    assert ("f8E4M3" in exact, "f8E4M3" in first) == (False, True)
    other = program(converted(model, RECIPES["current"], rules=[(".*/up", None)]))
    assert 0 < other.count("f8E4M3") < first.count("f8E4M3")
    assert program(model) == exact
    assert program(mine) == first


def test_a_converted_model_as_a_part_of_another():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, tokens):
            x = self.inner.encode(tokens)
            return nn.Dense(5)(x)  # not a part of what was converted

    outer, plain = Outer(converted(small(), RECIPES["delayed"])), Outer(small())
    variables, exact = jax.jit(lambda: [m.init(KEY, TOKENS) for m in (outer, plain)])()
    assert_same_bits(variables["params"], exact["params"])
    assert set(variables[COLLECTION]) == {"inner"}
    out, other = jax.jit(lambda v, w: (outer.apply(v, TOKENS), plain.apply(w, TOKENS)))(
        variables, exact
    )
    assert (out != other).any()


class Own(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.normal(), (16, 16))


class JittedOwn(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        return Own(name="own")(x)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_what_an_outer_module_changes_is_in_jitted_models(recipe):
    """gemma's LoRA changes layers so, of whole models in nn.jit."""

    class Outer(nn.Module):
        inner: nn.Module
        more: float

        def __call__(self, x):
            def change(next_fun, args, kwargs, context):
                y = next_fun(*args, **kwargs)
                changes = isinstance(context.module, Own) and context.method_name == "__call__"
                return y + self.more if changes else y

            with nn.intercept_methods(change):
                return self.inner(x)

    x = jnp.ones((4, 16))
    mine, _ = fp8.convert(JittedOwn(), getattr(fp8.recipes, recipe)(), inputs=(x,))
    variables = Outer(mine, 0.0).init(KEY, x)
    plain, changed = (Outer(mine, more).apply(variables, x) for more in (0.0, 1.0))
    np.testing.assert_allclose(changed, plain + 1, rtol=1e-6)
    assert_same_bits(Outer(mine, 1.0).init_with_output(KEY, x)[1], variables)


def test_a_converted_model_inside_a_converted_one_keeps_its_own_plan():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(5, name="last")(self.inner.encode(tokens))

    inner = converted(small(), RECIPES["current"])
    both, _ = fp8.convert(Outer(inner), RECIPES["delayed"], inputs=(TOKENS,))
    assert set(jax.eval_shape(both.init, KEY, TOKENS)[COLLECTION]) == {"last"}


def test_methods_strings_and_binding():
    mine = converted(small(), RECIPES["current"])
    variables = jax.jit(mine.init)(KEY, TOKENS)

    @jax.jit
    def run(variables):
        methods = "encode", LM.encode, lambda model, tokens: model.encode(tokens)
        return [
            small().apply(variables, TOKENS, method="encode"),
            mine.bind(variables).encode(TOKENS),
            *(mine.apply(variables, TOKENS, method=method) for method in methods),
        ]

    exact, want, *others = run(variables)
    for other in others:
        assert_same_bits(other, want)
    assert (want != exact).any()


def test_a_model_with_an_init_of_its_own():
    """As in some nanoGPTs: `init` takes a key and nothing else."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(WIDTH)(nn.Embed(VOCABULARY, WIDTH)(tokens))

        def init(self, key):
            return jax.jit(super().init)(key, TOKENS)

    mine, coverage = fp8.convert(Own(), RECIPES["delayed"], inputs=(TOKENS,))
    assert coverage.share == 1
    variables = mine.init(KEY)
    assert set(variables) == {"params", COLLECTION}
    assert_same_bits(variables["params"], Own().init(KEY)["params"])


class Jitted(nn.Module):
    """Its method is compiled once for all instances, as in google-deepmind/gemma."""

    @nn.jit
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)


def test_a_model_that_was_compiled_before_is_seen():
    x = jax.random.normal(KEY, (4, WIDTH))
    exact = Jitted().apply(Jitted().init(KEY, x), x)
    for recipe in ("delayed", "delayed", "current"):
        mine, coverage = fp8.convert(Jitted(), RECIPES[recipe], inputs=(x,))
        assert coverage.share == 1
        assert (mine.apply(mine.init(KEY, x), x) != exact).any()


def first_losses(model, x):
    """Three steps with one set of parameters. Quantizer state must not change what is computed."""
    variables = jax.jit(model.init)(KEY, x)
    params, state = variables["params"], variables.get(COLLECTION, {})
    run = jax.jit(fp8.value_and_grad(lambda p, s, x: model.apply({"params": p, COLLECTION: s}, x)))
    losses = []
    for _ in range(3):
        loss, _, state = run(params, state, x)
        losses.append(float(loss))
    return losses


class ReadsItsParameters(nn.Module):
    """Weight decay inside of a model."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(64)(x)
        leaves = jax.tree.leaves(self.variables["params"])
        return jnp.mean(y**2) + sum(jnp.sum(leaf**2) for leaf in leaves) / 1e3


class MapsItsParameters(nn.Module):
    @nn.compact
    def __call__(self, x):
        tripled = nn.map_variables(
            nn.Dense, "params", init=True, mutable=True,
            trans_in_fn=lambda tree: jax.tree.map(lambda w: w * 3.0, tree),
            trans_out_fn=lambda tree: jax.tree.map(lambda w: w / 3.0, tree),
        )  # fmt: skip
        return jnp.mean(tripled(64)(x) ** 2)


@pytest.mark.parametrize("kind", [ReadsItsParameters, MapsItsParameters])
def test_states_are_no_parameters_for_the_model(kind):
    x = jax.random.normal(KEY, (16, WIDTH))
    mine, _ = fp8.convert(kind(), RECIPES["delayed"], inputs=(x,))
    exact = jax.jit(lambda: kind().apply(kind().init(KEY, x), x))()
    np.testing.assert_allclose(first_losses(mine, x), float(exact), rtol=0.02)


def test_a_backward_rule_of_the_model_is_refused():
    class OwnBackward(nn.Module):
        @nn.compact
        def __call__(self, x):
            def call(layer, x):
                return layer(x)

            def forward(layer, x):
                return nn.vjp(call, layer, x)

            def backward(vjp, g):
                params, inputs = vjp(g)
                return jax.tree.map(jnp.sign, params), inputs

            rule = nn.custom_vjp(call, forward_fn=forward, backward_fn=backward)
            return jnp.mean(rule(nn.Dense(32), x) ** 2)

    x = jax.random.normal(KEY, (4, WIDTH))
    with pytest.raises(fp8.FP8StateError, match="its state is not collected"):
        first_losses(fp8.convert(OwnBackward(), RECIPES["delayed"], inputs=(x,))[0], x)


class Part(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)


class Applies(nn.Module):
    """Its own layer has the path that the layer of the other module has in a run of its own."""

    other: nn.Module
    stored: bool

    @nn.compact
    def __call__(self, x):
        if self.stored:
            variables = self.param("stored", self.other.init, x)
        else:
            variables = {"params": {"Dense_0": {k: jnp.ones(s) for k, s in SHAPES.items()}}}
        return nn.Dense(8)(x), jax.vmap(lambda x: self.other.apply(variables, x))(x)


SHAPES = {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)}


class Indexed(nn.Module):
    """A parameter that the inputs choose is an activation, like the result of a lookup."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (2, WIDTH, WIDTH))
        return jnp.einsum("bd,bde->be", x, w[x[:, 0].astype(int)])


@pytest.mark.parametrize(
    ("model", "cure"),
    [
        (nn.Sequential([lambda x: Part().apply(Part().init(KEY, x), x)]), "It has no matmul of pa"),
        (Indexed(), "It has no matmul of parameters that rules= could convert"),
    ],
)
def test_the_cure_if_rules_could_convert_nothing(model, cure):
    with pytest.raises(ValueError, match=rf"\n{cure}"):
        fp8.convert(model, RECIPES["current"], inputs=(jnp.ones((4, WIDTH)),))


@pytest.mark.parametrize("stored", [False, True])
def test_what_a_model_applies_by_itself_has_the_paths_of_its_parameters(stored):
    """If they are no parameters of the model, it stays as it is, and can be converted alone."""
    x, plain = jax.random.normal(KEY, (4, WIDTH)), Applies(Part(), stored)
    mine, coverage = fp8.convert(plain, RECIPES["delayed"], inputs=(x,), keep=())
    own = ["stored/params/Dense_0/kernel"] if stored else []
    assert [row.path for row in coverage] == ["Dense_0", *own]
    assert all(row.recipe for row in coverage)

    @jax.jit
    def run():
        variables, exact = mine.init(KEY, x), plain.init(KEY, x)
        alone, _ = fp8.convert(Part(), RECIPES["current"], inputs=(x,))
        both, _ = fp8.convert(Applies(alone, stored), RECIPES["current"], inputs=(x,))
        return (
            variables,
            exact,
            mine.apply(variables, x),
            plain.apply(exact, x),
            both.apply(exact, x),
        )

    variables, exact, got, want, both = run()
    assert_same_bits(variables["params"], exact.get("params"))
    assert set(variables[COLLECTION]) == {"Dense_0"} | ({"stored"} if stored else set())
    assert (got[0] != want[0]).any()
    assert bool((got[1] != want[1]).any()) == stored
    assert all((one != two).any() for one, two in zip(both, want, strict=True))


def test_a_converted_model_is_not_converted_again():
    mine = converted(small(), RECIPES["current"])
    with pytest.raises(ValueError, match=r"model is a LM that fp8\.convert made"):
        fp8.convert(mine, RECIPES["delayed"], inputs=(TOKENS,))


def test_states_go_beside_parameters_and_back():
    state = fp8.init_state(fp8.recipes.delayed(history_length=2))
    params = {"a": {"kernel": 1.0}, "empty": {}}
    variables = {"params": params, COLLECTION: {"a": {"fp8": state}, "own": {"x": 2.0}}}
    together = _together(variables)
    assert together == {
        "params": {"a": {"kernel": 1.0, "fp8": state}, "empty": {}},
        COLLECTION: {"own": {"x": 2.0}},
    }
    assert _apart(together) == variables
    assert _apart({"params": {"a": {"fp8": state}}}) == {COLLECTION: {"a": {"fp8": state}}}
    assert _apart({"batch_stats": {}}) == {"batch_stats": {}}
    params["a"]["fp8"] = 3.0
    with pytest.raises(fp8.FP8StateError, match=mentions("a/fp8", "'params'")):
        _together(variables)
