"""Converted linen models: the parameters of the model, and the matmuls of our layers."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits
from zoo import KEY, KINDS, LM, TOKENS, VOCABULARY, WIDTH, Block

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8DotGeneral

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "blockwise": fp8.recipes.blockwise(),
}


def converted(model, recipe, **options):
    return fp8.convert(model, recipe, inputs=(TOKENS,), **options)[0]


def loss_of(model):
    def loss(params, state, tokens):
        logits = model.apply({"params": params, COLLECTION: state}, tokens)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    return loss


# State is what transformations must carry, so every kind runs with it.
CASES = [(kind, "delayed") for kind in KINDS] + [("jit", "current"), ("scan", "blockwise")]


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_parameters_and_their_paths_and_values_do_not_change(kind, recipe):
    model = LM(kind)
    mine, want = (m.init(KEY, TOKENS) for m in (converted(model, RECIPES[recipe]), model))
    assert jax.tree.structure(mine["params"]) == jax.tree.structure(want["params"])
    if (
        kind == "jit"
    ):  # XLA compiles what initializes with what multiplies, so the last bit may differ
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mine["params"], want["params"]
        )
    else:
        assert_same_bits(mine["params"], want["params"])
    assert (COLLECTION in mine) == (recipe == "delayed")


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_each_way_to_repeat_blocks_trains(kind, recipe):
    """Every projection is in FP8, in each transformation, and every state sees its amax."""
    model = LM(kind)
    mine = converted(model, RECIPES[recipe])
    variables = mine.init(KEY, TOKENS)
    params, state = variables["params"], variables.get(COLLECTION, {})
    run = jax.jit(fp8.value_and_grad(loss_of(mine)))
    loss, grads, new = run(params, state, TOKENS)
    want, exact = jax.value_and_grad(lambda p: loss_of(model)(p, {}, TOKENS))(params)
    assert loss != want
    np.testing.assert_allclose(loss, want, rtol=0.03)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        if jnp.abs(theirs).max() > 1e-5:  # keys of attention have gradients of nearly 0
            cosine = jnp.sum(ours * theirs) / jnp.linalg.norm(ours) / jnp.linalg.norm(theirs)
            assert cosine > 0.9
    for leaf in jax.tree.leaves(new, is_leaf=lambda n: hasattr(n, "rows")):
        assert (leaf.amax_history[..., -1] > 0).all()  # x, w and g, of each layer of a stack


class Handmade(nn.Module):
    """`LM` with our layers."""

    recipe: fp8.Recipe

    def setup(self):
        self.embedding = nn.Embed(VOCABULARY, WIDTH)
        fields = {
            "dense": lambda *a, **k: FP8Dense(*a, recipe=self.recipe, **k),
            "plug": FP8DotGeneral.using(self.recipe),
        }
        self.blocks = [Block(**fields) for _ in range(3)]
        self.mix = fp8.linen.FP8Einsum((WIDTH, 4, 8), "btd,dhk->bthk", recipe=self.recipe)
        self.head = nn.Dense(VOCABULARY)

    encode = LM.encode
    kind = "loop"

    @nn.compact
    def __call__(self, tokens):
        return self.head(self.encode(tokens))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_program_state_and_results_are_those_of_layers_by_hand(recipe):
    by_hand, by_rules = Handmade(recipe), converted(LM(), recipe)
    variables = by_rules.init(KEY, TOKENS)
    assert_same_bits(variables, by_hand.init(KEY, TOKENS))
    assert jax.tree.structure(variables) == jax.tree.structure(by_hand.init(KEY, TOKENS))
    params, state = variables["params"], variables.get(COLLECTION, {})
    steps = [jax.jit(fp8.value_and_grad(loss_of(model))) for model in (by_rules, by_hand)]
    programs = [step.lower(params, state, TOKENS) for step in steps]
    assert programs[0].as_text() == programs[1].as_text()
    for _ in range(2):
        results = [step(params, state, TOKENS) for step in steps]
        assert_same_bits(*results)
        state = results[0][2]


def test_a_checkpoint_of_the_model_loads_as_it_is():
    model = LM("scan")
    saved = model.init(jax.random.key(7), TOKENS)["params"]
    mine = converted(model, RECIPES["current"])
    assert mine.apply({"params": saved}, TOKENS).shape == (2, 8, VOCABULARY)
    stateful = converted(model, RECIPES["delayed"])
    with pytest.raises(fp8.FP8StateError, match="state of recipe 'delayed' is missing"):
        stateful.apply({"params": saved}, TOKENS)


def test_frozen_variables_and_a_boxed_tree():
    from flax.core import freeze

    mine = converted(LM(), RECIPES["delayed"])
    variables = mine.init(KEY, TOKENS)
    assert_same_bits(mine.apply(freeze(variables), TOKENS), mine.apply(variables, TOKENS))


@pytest.mark.parametrize("recipe", [RECIPES["current"]], ids=["current"])
def test_jit_inside_of_a_model_keeps_no_program_of_another_model(recipe):
    """nn.jit keeps programs by the model's own fields, which conversion does not change."""
    model = LM("jit")
    params = model.init(KEY, TOKENS)["params"]
    exact = model.apply({"params": params}, TOKENS)
    mine = converted(model, recipe)
    variables = mine.init(KEY, TOKENS)
    first = mine.apply(variables, TOKENS)
    assert (first != exact).any()
    other = converted(model, recipe, rules=[(".*/up", None)])
    assert (other.apply(other.init(KEY, TOKENS), TOKENS) != first).any()
    assert_same_bits(model.apply({"params": params}, TOKENS), exact)
    assert_same_bits(mine.apply(variables, TOKENS), first)


def test_a_converted_model_as_a_part_of_another():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, tokens):
            x = self.inner.encode(tokens)
            return nn.Dense(5)(x)  # not a part of what was converted

    outer, plain = Outer(converted(LM(), RECIPES["delayed"])), Outer(LM())
    variables = outer.init(KEY, TOKENS)
    assert_same_bits(variables["params"], plain.init(KEY, TOKENS)["params"])
    assert set(variables[COLLECTION]) == {"inner"}
    out = outer.apply(variables, TOKENS)
    assert (out != plain.apply({"params": variables["params"]}, TOKENS)).any()


def test_a_converted_model_inside_a_converted_one_keeps_its_own_plan():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(5, name="last")(self.inner.encode(tokens))

    inner = converted(LM(), RECIPES["current"])
    both, _ = fp8.convert(Outer(inner), RECIPES["delayed"], inputs=(TOKENS,))
    assert set(both.init(KEY, TOKENS)[COLLECTION]) == {"last"}


def test_methods_strings_and_binding():
    mine = converted(LM(), RECIPES["current"])
    variables = mine.init(KEY, TOKENS)
    want = mine.apply(variables, TOKENS, method="encode")
    assert_same_bits(mine.apply(variables, TOKENS, method=LM.encode), want)
    assert_same_bits(mine.apply(variables, TOKENS, method=lambda m, t: m.encode(t)), want)
    assert_same_bits(mine.bind(variables).encode(TOKENS), want)
    exact = LM().apply(variables, TOKENS, method="encode")
    assert (want != exact).any()


def test_equal_conversions_are_equal_models():
    """jax.jit then does not trace a train step again."""
    one, two = (converted(LM(), RECIPES["current"]) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != converted(LM(), RECIPES["blockwise"])
    assert one != LM()
    assert isinstance(one, LM)
    assert type(one).__name__ == "LM"


def test_a_converted_model_can_be_pickled():
    mine = converted(LM(), RECIPES["delayed"])
    assert pickle.loads(pickle.dumps(mine)) == mine


def test_mutable_collections_and_random_streams():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(16)(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.Dropout(0.5, deterministic=not train)(x)
            self.sow("intermediates", "x", x)
            return nn.Dense(4)(x)

    x = jax.random.normal(KEY, (8, 16))
    mine, _ = fp8.convert(Net(), RECIPES["delayed"], inputs=(x,), arguments={"train": False})
    variables = mine.init(KEY, x, train=True)
    plain = Net().init(KEY, x, train=True)
    assert_same_bits({k: v for k, v in variables.items() if k != COLLECTION}, plain)
    rngs = {"dropout": jax.random.key(1)}
    y, changed = mine.apply(
        variables, x, train=True, rngs=rngs, mutable=["batch_stats", "intermediates"]
    )
    z, want = Net().apply(plain, x, train=True, rngs=rngs, mutable=["batch_stats", "intermediates"])
    assert jax.tree.structure(changed) == jax.tree.structure(want)
    assert (y != z).any()
    _, everything = mine.apply(variables, x, train=True, rngs=rngs, mutable=True)
    assert jax.tree.structure(everything["params"]) == jax.tree.structure(plain["params"])
    assert_same_bits(everything[COLLECTION], variables[COLLECTION])


def test_layers_that_only_a_later_call_makes_are_decided_by_the_same_rules():
    class Lazy(nn.Module):
        @nn.compact
        def __call__(self, x, extra=False):
            x = nn.Dense(16, name="always")(x)
            return nn.Dense(16, name="sometimes")(x) if extra else x

    x = jnp.ones((4, 16))
    mine, coverage = fp8.convert(Lazy(), RECIPES["delayed"], inputs=(x,))
    assert [row.path for row in coverage] == ["always"]
    assert set(mine.init(KEY, x, True)[COLLECTION]) == {"always", "sometimes"}


def test_subclasses_of_flax_s_layers():
    class Scaled(nn.Dense):
        """A subclass with a parameter of its own."""

        @nn.compact
        def __call__(self, inputs):
            return super().__call__(inputs) * self.param("gain", nn.initializers.ones, ())

    x = jax.random.normal(KEY, (4, 16))
    mine, coverage = fp8.convert(Scaled(8), RECIPES["current"], inputs=(x,))
    variables = mine.init(KEY, x)
    assert_same_bits(variables, Scaled(8).init(KEY, x))
    assert coverage[""].recipe == "current"
    want = fp8.dot(x, variables["params"]["kernel"], recipe=RECIPES["current"])
    assert_same_bits(mine.apply(variables, x), want)


def test_stochastic_rounding_takes_keys_from_its_stream():
    recipe = fp8.recipes.current(gradient_rounding="stochastic")
    mine = converted(LM(), recipe)
    variables = mine.init({"params": KEY, "fp8": KEY}, TOKENS)

    def grads(key):
        return jax.grad(lambda p: mine.apply({"params": p}, TOKENS, rngs={"fp8": key}).sum())(
            variables["params"]
        )

    first, again, other = (grads(jax.random.key(k)) for k in (1, 1, 2))
    assert_same_bits(first, again)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (first, other)), strict=True))


class Own(nn.Module):
    """A layer of somebody else, which calls `jnp.einsum`."""

    features: int

    def setup(self):
        self.w = self.param("w", nn.initializers.lecun_normal(), (WIDTH, self.features))

    def __call__(self, x):
        return jnp.einsum("...d,df->...f", x, self.w)


class WithOwn(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Own(WIDTH, name="two")(nn.relu(Own(WIDTH, name="one")(x)))


def compute_own(layer, einsum, x):
    return einsum("...d,df->...f", x, layer.w)


def test_layers_of_others():
    x = jax.random.normal(KEY, (4, WIDTH))
    mine, coverage = fp8.convert(
        WithOwn(), RECIPES["delayed"], inputs=(x,), layers={Own: compute_own}
    )
    assert [row.recipe for row in coverage] == ["delayed"] * 2
    assert coverage.share == 1
    variables = mine.init(KEY, x)
    assert set(variables[COLLECTION]) == {"one", "two"}
    assert_same_bits(variables["params"], WithOwn().init(KEY, x)["params"])
    y = x
    for name in ("one", "two"):
        y = fp8.dot(
            nn.relu(y) if name == "two" else y, variables["params"][name]["w"],
            recipe=RECIPES["delayed"], state=variables[COLLECTION][name]["fp8"],
        )  # fmt: skip
    assert_same_bits(mine.apply(variables, x), y)


def test_a_layer_of_others_has_one_matmul():
    def twice(layer, einsum, x):
        return einsum("...d,df->...f", einsum("...d,df->...f", x, layer.w), layer.w)

    with pytest.raises(ValueError, match="calls einsum twice") as error:
        fp8.convert(
            WithOwn(), RECIPES["current"], inputs=(jnp.ones((4, WIDTH)),), layers={Own: twice}
        )
    assert "in layer 'one'" in error.value.__notes__[0]


def test_a_tied_head_is_converted_if_asked():
    class Tied(nn.Module):
        def setup(self):
            self.embedding = nn.Embed(VOCABULARY, WIDTH)
            self.mlp = nn.Dense(WIDTH)

        def __call__(self, tokens):
            return self.embedding.attend(self.mlp(self.embedding(tokens)))

    plain, coverage = fp8.convert(Tied(), RECIPES["delayed"], inputs=(TOKENS,))
    assert coverage["embedding"].reason == "kept: lm_head"
    assert set(plain.init(KEY, TOKENS)[COLLECTION]) == {"mlp"}
    mine, coverage = fp8.convert(Tied(), RECIPES["delayed"], inputs=(TOKENS,), keep=())
    assert coverage.share == 1
    variables = mine.init(KEY, TOKENS)
    assert set(variables[COLLECTION]) == {"mlp", "embedding"}
    loss, _, new = fp8.value_and_grad(loss_of(mine))(
        variables["params"], variables[COLLECTION], TOKENS
    )
    assert jnp.isfinite(loss)
    amax = jnp.abs(variables["params"]["embedding"]["embedding"]).max()
    assert new["embedding"]["fp8"].amax_history[1, -1] == amax


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


def test_a_model_that_is_one_layer_counts():
    _, coverage = fp8.convert(nn.Dense(4), RECIPES["current"], inputs=(jnp.ones((2, 8)),))
    assert coverage.share == 1
    assert coverage[""].flops == 2 * 2 * 8 * 4


class Matmul(nn.Module):
    """A layer that is not flax's, and whose kernel has any name."""

    features: int
    name_of_kernel: str

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        return x @ self.param(self.name_of_kernel, nn.initializers.lecun_normal(), shape)


def kernel_and_einsum(layer, einsum, x):
    shape = (x.shape[-1], layer.features)
    w = layer.param(layer.name_of_kernel, nn.initializers.lecun_normal(), shape)
    return einsum("...d,df->...f", x, w)


class SharedScope(nn.Module):
    """As in google-deepmind/gemma: two layers keep their kernels in the scope of their parent."""

    @nn.compact
    def __call__(self, x):
        up, down = Matmul(64, "up"), Matmul(WIDTH, "down")
        nn.share_scope(self, up)
        nn.share_scope(self, down)
        return down(100 * nn.relu(up(x)))


def test_layers_of_one_scope_have_states_of_their_own():
    x = jax.random.normal(KEY, (4, WIDTH))
    mine, coverage = fp8.convert(
        SharedScope(), RECIPES["delayed"], inputs=(x,), layers={Matmul: kernel_and_einsum}
    )
    assert [(row.path, row.shape) for row in coverage] == [
        ("Matmul_0", (4, WIDTH, 64)), ("Matmul_1", (4, 64, WIDTH))
    ]  # fmt: skip
    assert coverage.share == 1
    variables = mine.init(KEY, x)
    assert_same_bits(variables["params"], SharedScope().init(KEY, x)["params"])

    def loss(params, state):
        return jnp.mean(mine.apply({"params": params, COLLECTION: state}, x) ** 2)

    _, _, new = fp8.value_and_grad(loss)(variables["params"], variables[COLLECTION])
    amaxes = [new[f"fp8_Matmul_{i}"].amax_history[0, -1] for i in (0, 1)]
    assert amaxes[0] == jnp.abs(x).max()
    assert amaxes[1] > 10 * amaxes[0]


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
    variables = model.init(KEY, x)
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
    exact = kind().apply(kind().init(KEY, x), x)
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


def test_stochastic_rounding_does_not_change_initial_values():
    recipe = fp8.recipes.current(gradient_rounding="stochastic")
    x = jnp.ones((4, WIDTH))
    for layer in (nn.Einsum((WIDTH, 16), "bd,dk->bk"), nn.Dense(16)):
        mine, _ = fp8.convert(layer, recipe, inputs=(x,))
        assert_same_bits(mine.init(KEY, x)["params"], layer.init(KEY, x)["params"])
    by_hand = fp8.linen.FP8Einsum((WIDTH, 16), "bd,dk->bk", recipe=recipe)
    assert_same_bits(by_hand.init(KEY, x), nn.Einsum((WIDTH, 16), "bd,dk->bk").init(KEY, x))


def test_a_later_call_with_other_shapes_has_the_recipes_of_the_table():
    h200 = fp8.Kernels("h200")
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    layer = nn.Dense(4096, param_dtype=jnp.bfloat16)
    mine, coverage = fp8.convert(layer, RECIPES["delayed"], inputs=(x,), kernels=h200)
    assert coverage[""].recipe == "delayed"
    few = jax.eval_shape(lambda: mine.init(KEY, jnp.ones((1, 4096), jnp.bfloat16)))
    assert COLLECTION in few


def test_a_converted_model_is_not_converted_again():
    mine = converted(LM(), RECIPES["current"])
    with pytest.raises(ValueError, match=r"model is a LM that fp8\.convert made"):
        fp8.convert(mine, RECIPES["delayed"], inputs=(TOKENS,))
