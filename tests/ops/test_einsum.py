"""einsum takes the equations of two operands that jnp.einsum takes, and names their indices in
errors.
"""

import functools
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P
from messages import Message

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

CURRENT, IDENTITY = fp8.recipes.current(), fp8.recipes.identity()
# E4M3 for gradients, too: it holds the small integers below, and sums of a few of them.
EXACT = fp8.recipes.current(gradient=fp8.E4M3, power_of_two=True)

# Equations that are more than one dot_general, with the shapes of their operands.
EQUATIONS = {
    "bcd,dk->bk": ((3, 2, 5), (5, 4)),
    "bd,dkc->bk": ((3, 5), (5, 4, 2)),
    "bcd,dkf->bk": ((3, 2, 5), (5, 4, 3)),
    "abc,de->": ((2, 3, 2), (3, 2)),
    "bdd,dk->bk": ((3, 4, 4), (4, 5)),
    "bd,dkk->bk": ((3, 4), (4, 5, 5)),
    "bb,bk->bk": ((4, 4), (4, 5)),
    "bdd,kd->bk": ((3, 4, 4), (5, 4)),
    "aab,bcc->": ((3, 3, 4), (4, 2, 2)),
    "bd,dk->kb": ((3, 1), (5, 4)),
    "bsd,bdf->bsf": ((1, 3, 5), (2, 5, 4)),
    "bcd,dk->ckb": ((3, 1, 5), (1, 4)),
    "...d,dk->...k": ((3, 2, 5), (5, 4)),
    "...d,...dk->...k": ((2, 3, 5), (3, 5, 4)),
    "...d,...k": ((3, 5), (3, 4)),
    "ij,jk": ((3, 5), (5, 4)),
    " b d , d k -> b k ": ((3, 5), (5, 4)),
    "Ba,cB->ac": ((5, 6), (7, 5)),
    ",dk->kd": ((), (3, 4)),
}


def small_integers(seed, shape):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def values_and_gradients(x, w, *functions):
    """Of each function."""

    def both(function):
        y, backward = jax.vjp(function, x, w)
        return y, *backward(jnp.asarray(small_integers(2, y.shape), y.dtype))

    return [both(function) for function in functions]


@functools.cache
def of_equations(recipe):
    """Of each equation, of `fp8.einsum` and of `jnp.einsum`: in one program instead of many."""
    operands = {}
    for equation, shapes in EQUATIONS.items():
        if recipe == EXACT:
            operands[equation] = [small_integers(seed, s) for seed, s in enumerate(shapes)]
        else:
            dtype = jnp.bfloat16 if len(equation) % 2 else jnp.float32
            operands[equation] = [
                np.random.default_rng(seed).standard_normal(s).astype(dtype)
                for seed, s in enumerate(shapes)
            ]

    @jax.jit
    def run(operands):
        return {
            equation: values_and_gradients(
                *both,
                functools.partial(fp8.einsum, equation, recipe=recipe),
                functools.partial(jnp.einsum, equation),
            )
            for equation, both in operands.items()
        }

    return run(operands)


def assert_equal(got, want):
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_fp8_takes_what_jnp_takes(equation):
    assert_equal(*of_equations(EXACT)[equation])


@pytest.mark.parametrize("equation", EQUATIONS)
def test_identity_is_jnp_einsum_to_the_bit(equation):
    assert_equal(*of_equations(IDENTITY)[equation])


@st.composite
def equations(draw):
    """Any equation of two operands: shared, repeated, summed and kept indices in any order."""
    sizes = {letter: draw(st.integers(1, 3)) for letter in "abcde"}
    operand = st.lists(st.sampled_from("abcde"), max_size=4)
    x, w = draw(operand), draw(operand)
    output = draw(st.permutations(sorted(set(x + w))))[: draw(st.integers(0, 4))]
    shapes = [tuple(sizes[letter] for letter in names) for names in (x, w)]
    return f"{''.join(x)},{''.join(w)}->{''.join(output)}", *shapes


@settings(max_examples=6)
@given(case=equations())
def test_any_equation(case):
    equation, *shapes = case
    x, w = (small_integers(seed, shape) for seed, shape in enumerate(shapes))

    @jax.jit  # one program for each equation, not one for each operation
    def run(x, w):
        size = jnp.einsum(equation, jnp.abs(x), jnp.abs(w))
        return fp8.einsum(equation, x, w, recipe=EXACT), jnp.einsum(equation, x, w), size

    got, want, size = map(np.asarray, run(x, w))
    assert got.shape == want.shape
    # A sum may be an integer that E4M3 does not hold. Each operand is then rounded, by at most 2^-4
    # of its magnitude.
    assert (np.abs(got - want) <= 0.13 * size).all()


def test_an_operand_is_summed_in_float32():
    """Read in the program: XLA:CPU sums bfloat16 in float32 anyway."""
    x, w = jnp.ones((512, 2), jnp.bfloat16), jnp.ones((2, 1), jnp.bfloat16)
    run = lambda x, w: fp8.einsum("cd,dk->k", x, w, recipe=CURRENT)
    assert re.search(r":f32\[2\] = reduce", str(jax.make_jaxpr(run)(x, w)))
    assert jax.jit(run)(x, w).item() == 1024  # bfloat16 cannot count beyond 256


def test_state_sees_the_operand_that_is_cast():
    recipe = fp8.recipes.delayed()
    loss_fn = lambda w, state: jnp.sum(
        fp8.einsum("bcd,dk->bk", jnp.ones((2, 6, 4)), w, recipe=recipe, state=state)
    )
    _, _, state = jax.jit(fp8.value_and_grad(loss_fn))(jnp.ones((4, 3)), fp8.init_state(recipe))
    np.testing.assert_array_equal(state.amax_history[:, -1], [6, 1, 1])


@pytest.mark.parametrize("kind", ["manual", "auto", "explicit"])
def test_a_shard_follows_its_axis(kind):
    """The axis of `w_shard` is of the operand as it is given; a sum before it moves it."""
    x, w = small_integers(0, (4, 6)), small_integers(1, (3, 6, 2))
    run = lambda x, w, shard: fp8.einsum("bd,cdk->bk", x, w, recipe=EXACT, w_shard=shard)
    want = jnp.einsum("bd,cdk->bk", x, w)
    types = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(types.get(kind, jax.sharding.AxisType.Auto),))
    function = functools.partial(run, shard=Shard(1, "fsdp"))
    spec = P(None, "fsdp")
    if kind == "manual":
        function = jax.shard_map(
            function, mesh=mesh, in_specs=(P("fsdp"), spec), out_specs=P("fsdp")
        )
    with jax.set_mesh(mesh):
        got = jax.jit(function)(
            jax.device_put(x, jax.NamedSharding(mesh, P())),
            jax.device_put(w, jax.NamedSharding(mesh, spec)),
        )
    np.testing.assert_array_equal(got, want)


def sharded(equation, shard, w_shape):
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    run = lambda x, w: fp8.einsum(equation, x, w, recipe=CURRENT, w_shard=shard)
    spec = P(*[None] * shard.axis, "fsdp")
    return jax.shard_map(run, mesh=mesh, in_specs=(P(), spec), out_specs=P())(
        jnp.ones((4, 6)), jnp.ones(w_shape)
    )


X, W = jnp.ones((2, 4)), jnp.ones((5, 3))
call = lambda *arguments: lambda: fp8.einsum(*arguments, recipe=CURRENT)
MESSAGES = {
    "sizes": Message(
        ValueError,
        call("bd,dk->bk", X, W),
        "index 'd' has size 4 in lhs and 5 in rhs",
        "must have the same size",
        "lhs [2, 4]",
    ),
    "sizes of a diagonal": Message(
        ValueError,
        call("dd,dk->k", X, W),
        "index 'd' of lhs has the sizes 2 and 4",
        "must have the same size",
        "'dd,dk->k'",
    ),
    "sizes of an ellipsis": Message(
        ValueError,
        call("...d,...dk->...k", jnp.ones((2, 4)), jnp.ones((3, 4, 5))),
        "an index of '...' has size 2 in lhs and 3 in rhs",
        "must have the same size",
        "'...d,...dk->...k'",
    ),
    "too few indices": Message(
        ValueError,
        call("d,dk->k", X, W),
        "'d' names 1 axes, but lhs has 2",
        "one index for each axis",
        "'...'",
    ),
    "too many indices": Message(
        ValueError,
        call("bd,dkc->bk", X, W),
        "'dkc' names 3 axes, but rhs has 2",
        "one index for each axis",
        "'...'",
    ),
    "an ellipsis of too few axes": Message(
        ValueError,
        call("...abc,dk->...k", X, W),
        "'...abc,dk->...k' of lhs [2, 4]",
        "Ellips",
        "Write for instance",
    ),
    "unknown in the output": Message(
        ValueError,
        call("bd,dk->bz", X, jnp.ones((4, 3))),
        "'bd,dk->bz'",
        "z",
        "Write for instance 'bd,dk->bk'",
    ),
    "twice in the output": Message(
        ValueError,
        call("bd,dk->bb", X, jnp.ones((4, 3))),
        "'bd,dk->bb'",
        "'b' appeared more than once",
        "Write for instance",
    ),
    "three operands": Message(
        ValueError,
        call("ab,bc,cd->ad", X, W),
        "has 3 operands",
        "takes two",
        "split it into einsums of two",
    ),
    "one operand": Message(
        ValueError, call("ab->b", X, W), "has 1 operands", "takes two", "einsums of two"
    ),
    "no string": Message(TypeError, call(5, X, W), "equation=5", "must be a string", "'bd,dk->bk'"),
    "a summed index is split": Message(
        ValueError,
        lambda: sharded("bd,cdk->bk", Shard(0, "fsdp"), (2, 6, 2)),
        "w_shard=Shard(axis=0, axis_name='fsdp')",
        "a mesh cannot split it",
        "Reduce it yourself (in shard_map also over mesh axis 'fsdp')",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_errors_name_the_indices_of_the_user(name):
    messages.check(MESSAGES[name])


def test_out_sharding_names_the_axes_of_the_result():
    """Of a transpose that is not its own inverse."""
    mesh = jax.make_mesh(
        (4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    specs = P("data", None, None), P(None, "tensor")
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(((8, 16, 32), (32, 64)), specs, strict=True)
    )
    asked = P("tensor", "data", None)
    run = functools.partial(
        fp8.einsum, "bsd,df->fbs", recipe=fp8.recipes.current(), out_sharding=asked
    )
    with jax.set_mesh(mesh):
        assert jax.eval_shape(run, x, w).sharding.spec == asked
