"""Programs with other code in place of their matmuls, for each equation that has programs inside.

A case is a function of `multiply`, of factors and of arrays. It calls `multiply(x, w, factor)`. The
traced one leaves out the factors. A run then multiplies by them, in the places of its matmuls.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from jaxfp8.jaxprs._data_flow import labels_of
from jaxfp8.jaxprs._flops import MATMULS
from jaxfp8.jaxprs._rewrite import Traced, run

KEYS = jax.random.split(jax.random.key(0), 3)
ARRAYS = {
    "x": jax.random.normal(KEYS[0], (2, 4)),
    "w": jax.random.normal(KEYS[1], (4, 4)),
    "ws": jax.random.normal(KEYS[2], (3, 4, 4)) / 2,
}
POLICIES = jax.checkpoint_policies


def on_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    return mesh, jax.NamedSharding(mesh, jax.P("data")), jax.NamedSharding(mesh, jax.P())


def placed(mul, f, x, w, ws):
    _, split, whole = on_a_mesh()
    inner = jax.jit(lambda x, w: mul(x, w, f[0]), in_shardings=(split, whole), out_shardings=split)
    return inner(x, w)


def sharded(mul, f, x, w, ws):
    data, none = jax.P("data"), jax.P()
    return jax.shard_map(
        lambda x, w, f: lax.psum(mul(x, w, f).sum(0), "data"), mesh=on_a_mesh()[0],
        in_specs=(data, none, none), out_specs=none,
    )(x, w, f[0])  # fmt: skip


def sharded_unchecked(mul, f, x, w, ws):
    return jax.shard_map(
        lambda x, w: mul(x, w, f[0]), mesh=on_a_mesh()[0], check_vma=False,
        in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"),
    )(x, w)  # fmt: skip


def scanned(mul, f, x, w, ws, **options):
    """Its constants, its carry and its outputs all multiply."""

    def body(x, each):
        w1, f0, f1 = each
        x = jnp.tanh(mul(x, w1, f0))
        return x, mul(x, w, f1)

    return lax.scan(body, x, (ws, f[0], f[1]), **options)


def scan_of_scans(mul, f, x, w, ws):
    def outer(x, f):
        x = lax.scan(lambda x, each: (jnp.tanh(mul(x, *each)), None), x, (ws, f[0]))[0]
        return jnp.tanh(mul(x, w, f[1])), x

    return lax.scan(outer, x, (f[0], f[1]), length=2)


def looped(mul, f, x, w, ws):
    """Both programs of the loop multiply."""
    return lax.while_loop(
        lambda c: (c[0] < 3) & (mul(c[1], w, f[0]).sum() < 1e6),
        lambda c: (c[0] + 1, mul(c[1], w, f[1])),
        (0, x),
    )


def chosen(n, mul, f, x, w, ws):
    branches = [
        lambda x: mul(x, w, f[0]),
        lambda x: x + 1,
        lambda x: mul(mul(x, w, f[1]), ws[0], f[2]),
    ]
    return lax.switch(jnp.where(x[0, 0] < 1e6, n, 0), branches, x)


def all_together(mul, f, x, w, ws):
    """remat, scan, jit and cond, one in another, and a matmul behind them."""

    def body(x, each):
        w, f, n = each
        inner = jax.jit(lambda x: mul(x, w, f) + n)
        return lax.cond(n < 2, inner, lambda x: x * 2, x), None

    loop = jax.checkpoint(lambda x: lax.scan(body, x, (ws, f[0], jnp.arange(3.0)))[0])
    return mul(jax.jit(loop)(x), w, f[1])


def with_keys(mul, f, x, w, ws):
    """Keys are constants, carried, split and returned."""

    def body(carry, each):
        (x, key), (w, f) = carry, each
        key, own = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(own, 0.5, x.shape), mul(x, w, f), x)
        return (x, key), jax.random.key_data(own)

    (x, key), keys = lax.scan(body, (x, KEYS[0]), (ws, f[0]))
    return x, jax.random.key_data(key), keys


@jax.custom_vjp
def twice_the_gradient(x):
    return x


twice_the_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def beside_others(mul, f, x, w, ws):
    """Equations with programs and derivatives of their own, which stay."""
    y = jax.nn.gelu(jax.nn.relu(twice_the_gradient(mul(x, w, f[0]))))
    y += lax.reduce(ws, 0.0, lax.add, (0, 1))[None]
    y += lax.cumsum(jnp.sort(y, 1), 1) + jnp.linalg.solve(w, x.T).T
    y += lax.associative_scan(jnp.add, y) + jnp.fft.ifft(jnp.fft.fft(y)).real
    with jax.named_scope("named"), jax.default_matmul_precision("highest"):
        return mul(y, w, f[1])


def static_outputs(mul, f, x, w, ws):
    """What is no array, is literal, is an argument, or is computed of constants only."""
    y = mul(x, w, f[0])
    return {"y": y, "again": (y, x), "one": jnp.float32(1), "zeros": jnp.zeros(3), "none": None}


CASES = {
    "a matmul": (lambda mul, f, x, w, ws: mul(x, w, f[0]), [()]),
    "two": (lambda mul, f, x, w, ws: jnp.tanh(mul(mul(x, w, f[0]), ws[0], f[1])), [(), ()]),
    "jit": (lambda mul, f, x, w, ws: jax.jit(lambda x, w: mul(x, w, f[0]))(x, w), [()]),
    "jit in jit": (
        lambda mul, f, x, w, ws: jax.jit(
            lambda x: jax.jit(lambda x: mul(x, w, f[0]) + 1)(x) + mul(x, w, f[1])
        )(x), [(), ()]
    ),
    "jit, inline": (
        lambda mul, f, x, w, ws: jax.jit(lambda x: mul(x, w, f[0]), inline=True)(x), [()]
    ),
    "jit with shardings": (placed, [()]),
    "remat": (
        lambda mul, f, x, w, ws: jax.checkpoint(lambda x: jnp.sin(mul(x, w, f[0])))(x), [()]
    ),
    "remat with a policy": (
        lambda mul, f, x, w, ws: jax.checkpoint(
            lambda x: jnp.sin(checkpoint_name(mul(jnp.sin(x), w, f[0]), "y")),
            policy=POLICIES.save_only_these_names("y"), prevent_cse=False,
        )(x), [()]
    ),
    "scan": (scanned, [(3,), (3,)]),
    "scan, reversed": (functools.partial(scanned, reverse=True), [(3,), (3,)]),
    "scan, unrolled": (functools.partial(scanned, unroll=2), [(3,), (3,)]),
    "scan of scans": (scan_of_scans, [(2, 3), (2,)]),
    "fori_loop": (
        lambda mul, f, x, w, ws: lax.fori_loop(
            0, 3, lambda i, x: jnp.tanh(mul(x, ws[i], f[0][i])), x
        ), [(3,)]
    ),
    "map": (
        lambda mul, f, x, w, ws: lax.map(lambda each: mul(x, *each), (ws, f[0])), [(3,)]
    ),
    "while": (looped, [(), ()]),
    "switch, first": (functools.partial(chosen, 0), [(), (), ()]),
    "switch, second": (functools.partial(chosen, 1), [(), (), ()]),
    "switch, third": (functools.partial(chosen, 2), [(), (), ()]),
    "shard_map": (sharded, [()]),
    "shard_map, unchecked": (sharded_unchecked, [()]),
    "all together": (all_together, [(3,), ()]),
    "keys": (with_keys, [(3,)]),
    "beside others": (beside_others, [(), ()]),
    "static outputs": (static_outputs, [()]),
    "vmap inside": (
        lambda mul, f, x, w, ws: jax.vmap(lambda w: mul(x, w, f[0]))(ws), [()]
    ),
    "ragged": (
        lambda mul, f, x, w, ws: f[0] ** (mul is scaled) * lax.ragged_dot(
            x, ws, jnp.array([1, 0, 1], jnp.int32)
        ), [()]
    ),
}  # fmt: skip
NO_GRADIENTS = ("while",)


def plain(x, w, factor):
    return jnp.matmul(x, w)


def scaled(x, w, factor):
    return jnp.matmul(x, w) * factor


def factors(loops):
    """Another factor for each matmul and iteration."""
    sizes = np.cumsum([0, *(int(np.prod(each)) for each in loops)])
    return [
        jnp.asarray(1 + (start + np.arange(int(np.prod(each)))).reshape(each) / 8, jnp.float32)
        for start, each in zip(sizes[:-1], loops, strict=True)
    ]


def places_of(traced):
    found = []

    def note(eqn, labels, place):
        if place is not None and eqn is not None and eqn.primitive.name in MATMULS:
            found.append(place)

    labels_of(traced.program, [0] * len(traced.arrays), note)
    return found


def rewritten(function, only=None):
    """The function with its matmuls times their factors, or with `only` one of them."""

    def call(f, *arrays):
        traced = Traced(functools.partial(function, plain, f), *arrays)
        places = places_of(traced)
        assert len(places) == len(f)
        extras = {place: f[i] for i, place in enumerate(places) if only in (None, i)}
        return run(
            traced, extras,
            lambda place, eqn, operands, f: eqn.primitive.bind(*operands, **eqn.params) * f,
        )  # fmt: skip

    return call


def unchanged(function):
    """The function with each matmul replaced by itself."""

    def call(f, *arrays):
        traced = Traced(functools.partial(function, plain, f), *arrays)
        return run(
            traced, dict.fromkeys(places_of(traced), ()),
            lambda place, eqn, operands, extra: eqn.primitive.bind(*operands, **eqn.params),
        )  # fmt: skip

    return call


def loss(outputs):
    floats = [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum((jnp.sum(jnp.sin(y) * y) for y in floats), jnp.float32(0))


def with_gradients(name, call):
    """The results of a case, and the gradients of the factors and the arrays."""

    def of(args):
        outs = call(*args)
        return loss(outs), outs

    differentiated = jax.grad(of, has_aux=True)
    return lambda *args: call(*args) if name in NO_GRADIENTS else differentiated(args)


@functools.cache
def results():
    """All cases in one program of each kind."""

    def of(make):
        calls = {
            name: with_gradients(name, make(function)) for name, (function, _) in CASES.items()
        }
        given = {name: factors(loops) for name, (_, loops) in CASES.items()}
        program = jax.jit(lambda given, arrays: {n: c(given[n], *arrays) for n, c in calls.items()})
        return program(given, tuple(ARRAYS.values()))

    return {
        "as it was": of(lambda function: functools.partial(function, plain)),
        "unchanged": of(unchanged),
        "by hand": of(lambda function: functools.partial(function, scaled)),
        "rewritten": of(rewritten),
    }


def compare(one, other, name, **tolerance):
    one, other = results()[one][name], results()[other][name]
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, **{"rtol": 0, "atol": 0} | tolerance)


@pytest.mark.parametrize("name", CASES)
def test_the_same_matmuls_give_the_same_bits(name):
    compare("unchanged", "as it was", name)


@pytest.mark.parametrize("name", CASES)
def test_others_are_in_their_places_with_their_extras(name):
    compare("rewritten", "by hand", name, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["two", "jit in jit", "scan of scans"])
@pytest.mark.parametrize("only", [0, 1])
def test_only_one_of_them(name, only):
    function, loops = CASES[name]
    arrays, f = ARRAYS.values(), factors(loops)
    others = [g if i == only else jnp.ones_like(g) for i, g in enumerate(f)]
    have = rewritten(function, only)(f, *arrays)
    want = function(scaled, others, *arrays)
    for x, y in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def dots(call, *args):
    return str(jax.make_jaxpr(call)(*args)).count("dot_general")


@pytest.mark.parametrize(
    "policy", [None, POLICIES.dots_saveable, POLICIES.save_only_these_names("y")]
)
def test_a_policy_decides_what_is_computed_again(policy):
    """Also what a name saves. The loss has one matmul, or the same one again, and two gradients."""

    def function(mul, f, x, w, ws):
        y = lambda x: jnp.sin(checkpoint_name(mul(jnp.sin(x), w, f[0]), "y"))
        return jax.checkpoint(y, policy=policy)(x)

    def of(call):
        return jax.grad(lambda f, *arrays: loss(call(f, *arrays)), (1, 2))

    args = factors([()]), *ARRAYS.values()
    found = [
        dots(of(call), *args) for call in (functools.partial(function, plain), unchanged(function))
    ]
    assert found == [4 if policy is None else 3] * 2


@pytest.mark.parametrize("name", ["two", "scan", "switch, first", "keys"])
def test_transformations_from_outside(name):
    """vmap, jvp and the second derivative of a run are those of the function."""
    function, loops = CASES[name]
    f = factors(loops)

    def of(call):
        of_x = lambda x: loss(call(f, x, ARRAYS["w"], ARRAYS["ws"]))
        along = lambda x: jax.jvp(of_x, (x,), (jnp.cos(x),))[1]
        return jax.vmap(along)(jnp.stack([ARRAYS["x"], 2 * ARRAYS["x"]]))

    np.testing.assert_allclose(
        of(unchanged(function)), of(functools.partial(function, plain)), rtol=1e-6
    )


def test_static_arguments_and_results():
    """Flags, functions and text pass through. They are not traced."""

    def function(x, flag, how, options):
        assert flag is True
        return {"y": how(x @ options["w"]), "name": options["name"], "none": None, "n": 3, "x": x}

    args = ARRAYS["x"], True, jnp.tanh, {"w": ARRAYS["w"], "name": "tanh"}
    traced = Traced(function, *args)
    (place,) = places_of(traced)
    out = run(traced, {place: ()}, lambda place, eqn, operands, extra: 2 * operands[0])
    assert (out["name"], out["none"], out["n"]) == ("tanh", None, 3)
    np.testing.assert_array_equal(out["y"], jnp.tanh(2 * ARRAYS["x"]))
    np.testing.assert_array_equal(out["x"], ARRAYS["x"])


def test_only_what_is_on_the_way_is_made_anew():
    """Other programs are the same objects, so that JAX finds what it compiled for them."""
    other = jax.jit(jnp.sin)
    traced = Traced(lambda x, w: other(jax.jit(jnp.matmul)(other(x), w)), ARRAYS["x"], ARRAYS["w"])
    (place,) = places_of(traced)
    again = jax.make_jaxpr(
        lambda x: run(traced, {place: x}, lambda place, eqn, operands, extra: extra)
    )(ARRAYS["x"])
    have, want = ([eqn.params["jaxpr"] for eqn in p.eqns] for p in (again, traced.program))
    assert [x is y for x, y in zip(have, want, strict=True)] == [True, False, True]


def test_prints_stay_in_order(capfd):
    def body(x, w):
        jax.debug.print("before", ordered=True)
        x = jnp.tanh(x @ w)
        jax.debug.print("after {}", x.shape[0], ordered=True)
        return x, None

    traced = Traced(lambda x, ws: lax.scan(body, x, ws)[0], ARRAYS["x"], ARRAYS["ws"])
    (place,) = places_of(traced)
    out = run(traced, {place: jnp.arange(3.0)}, lambda place, eqn, operands, f: operands[0] + f)
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:-1] == ["before", "after 2"] * 3
