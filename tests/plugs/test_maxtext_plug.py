"""`jaxfp8.plugs.maxtext`, called as MaxText calls it.

MaxText is not on a package index. The classes here repeat how its layers, its train step and its
loop over microbatches call a quantization (`layers/linears.py`, `layers/moe.py`,
`trainers/pre_train/train.py`, `utils/gradient_accumulation.py`), as the patch of
docs/maxtext.md changes them.
"""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from messages import Message, check
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.plugs import maxtext
from jaxfp8.plugs.maxtext import FP8Quantization, configure, gathered

RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
# A plug hands its recipe on: one with state, and one whose tiles span tokens, show that it does.
FEW = [
    pytest.param(name, marks=() if name in ("delayed", "blockwise") else pytest.mark.slow)
    for name in RECIPES
]
OWG = nnx.variablelib.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
RULES = [
    ["activation_batch", ["data", "fsdp"]],
    ["activation_length", []],
    ["mlp", ["fsdp_transpose", "tensor"]],
    ["heads", "tensor"],
    ["embed", ["fsdp", "fsdp_transpose"]],
    ["embed", ["fsdp"]],
]
GATHERED = (("activation_batch", ("fsdp",)), ("embed", ("fsdp",)))


class Dense(nnx.Module):
    """The dense layer of MaxText, as far as it concerns the quantization."""

    def __init__(self, k, n, quant, axes=("embed", "mlp")):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(0), (k, n)) * k**-0.5)
        self.inner = nnx.bridge.ToNNX(quant.dot_general_cls(mesh_axes=axes)(), rngs=nnx.Rngs(0))
        self.inner.lazy_init(jnp.zeros((1, k)), self.kernel[...], (((1,), (0,)), ((), ())))
        self(jnp.zeros((1, k)))  # MaxText makes its layers outside of its mesh, and calls each once

    def __call__(self, x):
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        return self.inner(x, self.kernel[...], dims, precision=None, mutable=["aqt"])


def train_step(model, x, lr=0.5):
    """One gradient for the parameters and for the collection, which it then overwrites."""
    graphdef, params, state, rest = nnx.split(model, nnx.Param, OWG, ...)

    def loss(params, state, rest):
        y = nnx.merge(graphdef, params, state, rest, copy=True)(x)
        return jnp.mean(y**2)

    value, (grads, new) = jax.value_and_grad(loss, argnums=(0, 1))(params, state, rest)
    params = jax.tree.map(lambda p, g: p - lr * g, params, grads)
    return nnx.merge(graphdef, params, new, rest), value


@pytest.mark.parametrize("name", FEW)
def test_trains_as_the_op_does(name):
    recipe = fp8.recipes.get(name)
    x = jax.random.normal(jax.random.key(1), (2, 32, 128))
    model = Dense(128, 64, FP8Quantization(recipe=recipe, gather_rules=GATHERED))
    w, state = model.kernel[...], fp8.init_state(recipe)

    def loss_fn(w, state):
        return jnp.mean(fp8.dot(x, w, recipe=recipe, state=state) ** 2)

    step = nnx.jit(train_step)
    reference = jax.jit(fp8.value_and_grad(loss_fn))
    losses = []
    for _ in range(3):
        model, value = step(model, x)
        expected, grad, state = reference(w, state)
        w = w - 0.5 * grad
        assert_same_bits((value, model.kernel[...]), (expected, w))
        losses.append(float(value))
    assert losses[2] < losses[0]
    found = jax.tree.leaves(nnx.state(model, OWG))
    assert len(found) == len(jax.tree.leaves(state))
    if recipe.rows:
        history = model.inner.fp8.get_value().amax_history
        assert_same_bits(history, state.amax_history)


EXPERTS, TOKENS, WIDTH, HIDDEN = 4, 64, 32, 64


class Experts(nnx.Module):
    """MaxText's layer of experts. Here each token has one expert, `ids`."""

    def __init__(self, quant, *, sparse, mesh=None, check_vma=False, prefuse=False, ep="expert"):
        keys = jax.random.split(jax.random.key(3), 3)
        normal = functools.partial(jax.random.normal, dtype=jnp.float32)
        self.wi_0 = nnx.Param(normal(keys[0], (EXPERTS, WIDTH, HIDDEN)) * WIDTH**-0.5)
        self.wi_1 = nnx.Param(normal(keys[1], (EXPERTS, WIDTH, HIDDEN)) * WIDTH**-0.5)
        self.wo = nnx.Param(normal(keys[2], (EXPERTS, HIDDEN, WIDTH)) * HIDDEN**-0.5)
        self.config = types.SimpleNamespace(sparse_matmul=sparse, prefuse_moe_weights=prefuse)
        self.num_experts, self.dtype, self._expert_parallelism_name = EXPERTS, jnp.float32, ep
        self.mesh, self.check_vma = mesh, check_vma
        self.quant = nnx.data(quant.of_experts(self))

    def __call__(self, x, ids):
        kernels = [self.wi_0[...], self.wi_1[...], self.wo[...]]
        return (
            self.sparse(x, ids, *kernels)
            if self.config.sparse_matmul
            else self.dense(x, ids, *kernels)
        )

    def dense(self, x, ids, w0, w1, wo):
        einsum = self.quant.einsum
        mask = jax.nn.one_hot(ids, EXPERTS, dtype=x.dtype)[:, None]  # [B, S=1, E]
        tokens = ("activation_batch_moe", "activation_norm_length_moe", None)
        x = einsum(mesh_axes=tokens)("BSM,BSE -> EBM", x[:, None], mask)
        axes = ("exp", "embed_moe", "mlp_moe")
        gate = einsum(mesh_axes=axes)("EBM,EMH -> EBH", x, w0, precision=None)
        up = einsum(mesh_axes=axes)("EBM,EMH -> EBH", x, w1, precision=None)
        y = einsum(mesh_axes=axes)("EBH,EHM -> EBM", jax.nn.silu(gate) * up, wo, precision=None)
        return einsum(mesh_axes=tokens)("EBM,BSE -> BSM", y, mask)[:, 0]

    def sparse(self, x, ids, w0, w1, wo):
        spec, up, down = jax.P("fsdp"), jax.P(None, None, "tensor"), jax.P(None, "tensor")

        @functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(spec, spec, up, up, down, jax.P()),
            out_specs=spec, check_vma=self.check_vma,
        )  # fmt: skip
        def compute(x, ids, w0, w1, wo, states):
            order, y = jnp.argsort(ids, stable=True), None
            sizes = jnp.sum(ids[:, None] == jnp.arange(EXPERTS)[None], axis=0)
            gmm = functools.partial(
                self.quant.gmm(states), group_sizes=sizes, expert_assignments=ids[order],
                group_offset=0, weight_gather_axes=[], tiling=(512, 1024, 1024),
            )  # fmt: skip
            y = gmm(jax.nn.silu(gmm(x[order], w0)) * gmm(x[order], w1), wo)
            return jax.lax.psum(y, "tensor")[jnp.argsort(order)]

        return compute(x, ids, w0, w1, wo, self.quant.gmm_states())


def mesh_of(fsdp, tensor):
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=auto)


def tokens_and_experts():
    x = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))
    ids = jax.random.randint(jax.random.key(2), (TOKENS,), 0, EXPERTS)
    return x * jnp.linspace(0.25, 1.0, TOKENS)[:, None], ids


def train_experts(model, steps=3, lr=0.5):
    """The losses, and the last amax histories."""
    x, ids = tokens_and_experts()
    scale = 1 / jnp.mean(x**2)
    graphdef, params, state, rest = nnx.split(model, nnx.Param, OWG, ...)

    @jax.jit
    def step(params, state):
        def loss(params, state):
            return scale * jnp.mean(
                nnx.merge(graphdef, params, state, rest, copy=True)(x, ids) ** 2
            )

        value, (grads, new) = jax.value_and_grad(loss, argnums=(0, 1))(params, state)
        return jax.tree.map(lambda p, g: p - lr * g, params, grads), new, value

    losses = []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses, state


def histories(state):
    is_state = lambda node: isinstance(node, fp8.state.MatmulState)
    leaves = jax.tree.leaves(state, is_leaf=is_state)
    return [jax.device_get(leaf.amax_history) for leaf in leaves]


def plain_experts(recipe, states, params, x, ids):
    """The same layer by `fp8.ragged_dot`, on one device."""
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.sum(ids[:, None] == jnp.arange(EXPERTS)[None], axis=0)
    gmm = lambda x, w, state: fp8.ragged_dot(x, w, sizes, recipe=recipe, state=state)
    gate, up = (gmm(x[order], w, s) for w, s in zip(params[:2], states[:2], strict=True))
    return gmm(jax.nn.silu(gate) * up, params[2], states[2])[jnp.argsort(order)]


@pytest.mark.parametrize("name", [*FEW[:2], "rowwise", *FEW[3:]])  # rows refuse reduce_axes=
def test_sparse_experts_train_as_ragged_dot_does(name):
    recipe = fp8.recipes.get(name)
    model = Experts(FP8Quantization(recipe=recipe), sparse=True, mesh=mesh_of(1, 1))
    params = [model.wi_0[...], model.wi_1[...], model.wo[...]]
    losses, state = train_experts(model)
    x, ids = tokens_and_experts()
    scale = 1 / jnp.mean(x**2)

    def loss(params, states):
        return scale * jnp.mean(plain_experts(recipe, states, params, x, ids) ** 2)

    one = fp8.init_state(recipe)
    of_experts = jax.vmap(lambda _: one)(jnp.zeros(EXPERTS)) if recipe.rows else ()
    states, expected = [of_experts] * 3, []
    step = jax.jit(fp8.value_and_grad(loss))
    for _ in range(3):
        value, grads, states = step(params, states)
        params = [p - 0.5 * g for p, g in zip(params, grads, strict=True)]
        expected.append(float(value))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[2] < losses[0]
    for found, like in zip(histories(state), histories(states), strict=True):
        assert found.shape[0] == EXPERTS
        assert jnp.allclose(found, like, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
def test_amaxes_of_experts_are_those_of_all_devices(check_vma):
    quant = FP8Quantization(recipe=fp8.recipes.delayed())
    found = [
        train_experts(Experts(quant, sparse=True, mesh=mesh_of(*shape), check_vma=check_vma), 1)
        for shape in [(1, 1), (2, 4)]
    ]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, many in zip(*(histories(state) for _, state in found), strict=True):
        assert jnp.max(one) > 0
        assert jnp.allclose(one, many, rtol=1e-5)  # a sum of ledgers is up to 1/8 above


@pytest.mark.parametrize(("name", "rtol"), [("current", 1e-5), ("rowwise", 1e-2)])
def test_scales_of_experts_on_many_devices(name, rtol):
    """Scales of tensors are those of all devices. A device scales its own part of a row."""
    quant = FP8Quantization(recipe=fp8.recipes.get(name))
    losses = [
        train_experts(Experts(quant, sparse=True, mesh=mesh_of(*shape)))[0]
        for shape in [(1, 1), (8, 1)]
    ]
    assert losses[0] == pytest.approx(losses[1], rel=rtol)


@pytest.mark.parametrize("name", FEW)
def test_dense_experts_train(name):
    recipe = fp8.recipes.get(name)
    losses, state = train_experts(Experts(FP8Quantization(recipe=recipe), sparse=False))
    plain = FP8Quantization(recipe=fp8.recipes.identity())
    expected, _ = train_experts(Experts(plain, sparse=False))
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.1)
    if recipe.rows:  # x, and each weight, have their own amaxes: no state serves two matmuls
        amaxes = [history[:, -1] for history in histories(state)]
        assert len(amaxes) == 3
        assert amaxes[0][0] == amaxes[1][0] != amaxes[2][0]
        assert len({float(each[1]) for each in amaxes}) == 3


def test_a_call_that_failed_leaves_no_count():
    """Else the states of gate, up and down would be permuted."""
    model = Experts(FP8Quantization(recipe=fp8.recipes.current()), sparse=False)
    model.wi_1 = nnx.Param(jnp.ones((EXPERTS, WIDTH + 1, HIDDEN)))
    with pytest.raises(ValueError, match="M"):  # the letter of the axis
        model(*tokens_and_experts())
    assert model.quant.called == 0


def test_masks_of_dense_experts_are_not_quantized():
    layer = Experts(FP8Quantization(recipe=fp8.recipes.current()), sparse=False)
    x, mask = tokens_and_experts()[0][:, None], jnp.full((TOKENS, 1, EXPERTS), 0.3)
    axes = ("activation_batch_moe", "activation_norm_length_moe", None)
    found = layer.quant.einsum(mesh_axes=axes)("BSM,BSE -> EBM", x, mask)
    assert_same_bits(found, jnp.einsum("BSM,BSE -> EBM", x, mask))
    assert layer.quant.called == 0


def test_microbatches_keep_a_state_of_each():
    """MaxText's loop over microbatches: each of them starts with the state of the one before."""
    recipe = fp8.recipes.delayed()
    model = Dense(128, 64, FP8Quantization(recipe=recipe))
    x = jax.random.normal(jax.random.key(1), (2, 32, 128)) * jnp.array([1.0, 3.0])[:, None, None]
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, OWG))
    run = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), argnums=wrt)

    def accumulate(carry, x):
        total, rest = carry
        local = nnx.merge(graphdef, params, rest, copy=True)
        value, grads = run(local, x)
        grads, overwrites = nnx.split_state(grads, nnx.Param, ...)
        nnx.update(local, overwrites)
        _, _, rest = nnx.split(local, nnx.Param, ...)
        return (jax.tree.map(jnp.add, total, grads), rest), value

    start = (jax.tree.map(jnp.zeros_like, params), rest)
    (total, rest), _ = jax.jit(lambda start, x: jax.lax.scan(accumulate, start, x))(start, x)
    w, state, sums = model.kernel[...], fp8.init_state(recipe), 0.0
    step = jax.jit(
        fp8.value_and_grad(
            lambda w, state, x: jnp.mean(fp8.dot(x, w, recipe=recipe, state=state) ** 2)
        )
    )
    for each in x:
        _, grad, state = step(w, state, each)
        sums = sums + grad
    (found,) = jax.tree.leaves(total)
    assert jnp.allclose(found, sums, rtol=1e-4, atol=1e-6)  # a loop may round otherwise
    (history,) = histories(nnx.filter_state(rest, OWG))
    assert jnp.allclose(history, state.amax_history, rtol=1e-5)
    assert jnp.sum(history[0] > 0) == 2


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", "mlp"), fp8.Shard(0, ("fsdp",))),  # fsdp_transpose splits "mlp"
        (("mlp", "embed"), fp8.Shard(1, ("fsdp",))),
        (("heads", None, "mlp"), None),
        ((None, "heads"), None),
        ((), None),
    ],
)
def test_which_axis_is_gathered(axes, expected):
    assert gathered(axes, RULES) == expected


def test_kernels_are_gathered_in_fp8():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    quant = FP8Quantization(recipe=fp8.recipes.current(), gather_rules=GATHERED)
    plug = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((64, 128)), jax.P("fsdp"))
        w = jax.device_put(jnp.ones((128, 64)), jax.P("fsdp"))

        def loss(w):
            y = plug.apply({}, x, w, (((1,), (0,)), ((), ())))
            return jnp.mean(y**2)

        compiled = jax.jit(jax.grad(loss)).lower(w).compile()
    lines = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    assert lines
    assert all("= u8[" in line or "= f8" in line for line in lines)


def test_remat_policy_of_maxtext_keeps_residuals():
    recipe = fp8.recipes.current()
    policy = jax.checkpoint_policies.save_only_these_names("mlpwi", "quantization")

    def loss(x, w, policy):
        block = jax.checkpoint(lambda x, w: fp8.dot(x, w, recipe=recipe), policy=policy)
        return jnp.sum(block(x, w) ** 2)

    x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
    nothing = jax.checkpoint_policies.nothing_saveable
    trace = jax.make_jaxpr(jax.grad(loss), static_argnums=2)
    saved = [str(trace(x, w, each)) for each in (policy, fp8.save_fp8_residuals(), nothing)]
    casts = [text.count("bitcast_convert_type") for text in saved]
    assert casts[0] == casts[1] < casts[2]  # the backward pass casts no operand again


def config(quantization):
    return types.SimpleNamespace(quantization=quantization, logical_axis_rules=RULES)


def call_gmm(recipe="delayed", experts=EXPERTS, **given):
    layer = Experts(FP8Quantization(recipe=fp8.recipes.get(recipe)), sparse=True)
    x, w = jnp.ones((TOKENS, WIDTH)), jnp.ones((experts, WIDTH, HIDDEN))
    sizes = jnp.full((experts,), TOKENS // experts)
    return layer.quant.gmm(layer.quant.gmm_states())(x, w, group_sizes=sizes, **given)


@pytest.mark.parametrize("name", [*RECIPES, "identity"])
def test_configure(name):
    quant = configure(config(f"jaxfp8_{name}"), kernels=fp8.Kernels("h200"))
    assert quant.recipe == fp8.recipes.get(name)
    made = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
    assert (made.w_shard, made.kernels) == (fp8.Shard(0, ("fsdp",)), fp8.Kernels("h200"))
    assert configure(config(f"jaxfp8_{name}"), gather=False).gather_rules is None
    assert quant.quant_mode == "train"


MESSAGES = {
    "unknown recipe": Message(
        ValueError, lambda: configure(config("jaxfp8_nvfp4")), "'jaxfp8_nvfp4'", "no recipe",
        "jaxfp8_blockwise",
    ),
    "another library": Message(
        ValueError, lambda: configure(config("int8")), "'int8'", "no recipe", "jaxfp8_blockwise"
    ),
    "older patch, sparse": Message(
        NotImplementedError, lambda: FP8Quantization(recipe=fp8.recipes.current()).quant_dg,
        "quant_dg", "no quantization of its own", "docs/maxtext.md",
    ),
    "older patch, dense": Message(
        NotImplementedError, lambda: FP8Quantization(recipe=fp8.recipes.current()).einsum(),
        "einsum", "no quantization of its own", "docs/maxtext.md",
    ),
    "gathered kernels": Message(
        ValueError, lambda: call_gmm(weight_gather_axes=[("fsdp", 0)]),
        "weight_gather_axes=[('fsdp', 0)]", "does not take", "shard_exp_on_fsdp=False",
    ),
    "offset": Message(
        ValueError, lambda: call_gmm(group_offset=2), "group_offset=2", "does not take",
        "use_ragged_sort=False",
    ),
    "partial sums": Message(
        ValueError, lambda: call_gmm(partial_sum=jnp.ones(1)), "partial_sum", "does not take",
        "num_moe_emb_chunks=0",
    ),
    "expert parallelism": Message(
        ValueError, lambda: call_gmm(experts=2), "'delayed'", "has 2 of them", "jaxfp8_current",
    ),
    "keys": Message(
        ValueError,
        lambda: FP8Quantization(recipe=fp8.recipes.current(gradient_rounding="stochastic")),
        "'current'", "needs a key", "gradient_rounding='nearest'",
    ),
    "no recipe": Message(
        TypeError, lambda: FP8Quantization(recipe="current"), "recipe='current'", "Recipe",
        "fp8.recipes.current()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages(message):
    check(message)


def test_the_plug_has_the_methods_of_the_interface():
    assert {"dot_general_cls", "einsum", "quant_mode"} <= set(dir(maxtext.FP8Quantization))
    assert {"einsum", "gmm", "quant_mode"} <= set(dir(maxtext.ExpertsQuantization))
