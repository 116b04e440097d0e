"""Which matmuls multiply by a weight, for each way in which a program can get one."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType

from jaxfp8.jaxprs import _weights
from jaxfp8.jaxprs._flops import layer_scope
from jaxfp8.jaxprs._weights import weights_of

PARAMETERS = {"w": (4, 4), "v": (4, 4), "ws": (3, 4, 4), "table": (8, 4), "s": (4,)}
INPUTS = {"x": (2, 4), "xs": (3, 2, 4)}
INTEGERS = {"ids": (2,), "n": ()}


def array(name):
    shape = (PARAMETERS | INPUTS | INTEGERS)[name]
    return jnp.zeros(shape, jnp.int32 if name in INTEGERS else jnp.float32)


def read(function):
    """How a function uses its parameters, which are those named in `PARAMETERS`."""
    names = list(inspect.signature(function).parameters)
    known = [name for name in names if name in PARAMETERS]
    program = jax.make_jaxpr(function)(*map(array, names))
    return weights_of(program, [known.index(n) if n in known else None for n in names]), known


def rows(function):
    """A line for each matmul of a weight, and for each weight that something hides."""
    weights, known = read(function)

    def line(matmul):
        parts = ["+".join(known[number] for number in matmul.parameters), matmul.equation]
        parts += ["left"] if matmul.side == 0 else []
        parts += [f"in {list(matmul.loops)}"] if matmul.loops else []
        parts += ["looked up"] if matmul.lookup else []
        return ", ".join(parts + [matmul.obstacle] * bool(matmul.obstacle))

    return [
        *map(line, weights.matmuls), *(f"{known[n]}: {reason}" for n, reason in weights.hidden)
    ]  # fmt: skip


W = "w, ab,bc->ac"
V = "v, ab,bc->ac"
BOTH = "w+v, ab,bc->ac"
WS = "ws, ab,bc->ac"


def ragged(x, ws):
    return lax.ragged_dot(x, ws, jnp.array([1, 0, 1], jnp.int32))


OPERATIONS = {
    "matmul": (lambda x, w: x @ w, W),
    "dot": (lambda x, w: jnp.dot(x, w), W),
    "a vector": (lambda x, w: x[0] @ w, "w, a,ab->b"),
    "tensordot": (lambda x, ws: jnp.tensordot(x, ws, ((1,), (2,))), "ws, ab,cdb->acd"),
    "dot_general": (
        lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), "w, ab,cb->ac"
    ),
    "on the left": (lambda x, w: w @ x.T, "w, ab,ca->bc, left"),
    "einsum": (lambda x, w: jnp.einsum("bd,df->bf", x, w), W),
    "einsum, turned": (lambda x, w: jnp.einsum("df,bd->fb", w, x), f"{W}, left"),
    "einsum of one head each": (
        lambda xs, ws: jnp.einsum("htd,hdf->htf", xs, ws), "ws, abc,acd->abd"
    ),
    "einsum of two summed axes": (
        lambda xs, ws: jnp.einsum("htd,hdf->tf", xs, ws), "ws, abc,acd->bd"
    ),
    "ragged_dot": (ragged, "ws, ragged td,edf->tf"),
    "ragged rows that inputs choose": (
        lambda x, ws, ids: lax.ragged_dot(x, ws, jnp.zeros(3, jnp.int32).at[ids].add(1)),
        "ws, ragged td,edf->tf",
    ),
}  # fmt: skip


@jax.custom_jvp
def through(w):
    return jnp.round(w)


through.defjvp(lambda primals, tangents: (through(*primals), *tangents))


WEIGHTS = {
    "cast": (lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), W),
    "transposed": (lambda x, w: x @ w.T, W),
    "reshaped": (lambda x, w: x @ w.reshape(2, 2, 4).reshape(4, 4), W),
    "a slice": (lambda x, ws: x @ ws[1], WS),
    "rows by constants": (lambda x, table: x @ table[jnp.array([1, 3, 5, 7])], "table, ab,bc->ac"),
    "two parts": (lambda x, w: [x @ part for part in jnp.split(w, 2, 1)], W, W),
    "concatenated": (lambda x, w, v: x @ jnp.concatenate([w, v], 1), BOTH),
    "stacked": (lambda xs, w, v: xs[:2] @ jnp.stack([w, v]), "w+v, abc,acd->abd"),
    "a factor": (lambda x, w, s: x @ (w * s[:, None]), "w+s, ab,bc->ac"),
    "normalized": (lambda x, w: x @ (w / jnp.linalg.norm(w)), W),
    "rounded": (lambda x, w: x @ jnp.round(w * 8), W),
    "a derivative of its own": (lambda x, w: x @ through(w), W),
    "an activation function": (lambda x, w: x @ jax.nn.gelu(jax.nn.relu(w)), W),
    "without a gradient": (lambda x, w: x @ lax.stop_gradient(w), W),
    "behind a barrier": (lambda x, w: x @ lax.optimization_barrier((x, w))[1], W),
    "noise of a constant key": (lambda x, w: x @ (w + jax.random.normal(jax.random.key(0), ())), W),
    "a mask of constants": (lambda x, w: x @ jnp.where(np.eye(4) > 0, w, 0.0), W),
    "parameters times parameters": (lambda x, w, v: x @ (w @ v), BOTH),
    "LoRA": (lambda x, w, v, s: x @ (w + v * 2 @ v.T) * s[0], BOTH),
    "one after another": (lambda x, w, v: x @ w @ v, W, V),
    "at two places": (lambda x, w: jnp.tanh(x @ w) @ w, W, W),
    "tied": (lambda ids, table: table[ids] @ table.T, "table, ab,bc->ac"),
    "one_hot": (lambda ids, table: jax.nn.one_hot(ids, 8) @ table, "table, ab,bc->ac, looked up"),
    "one_hot, cast": (
        lambda ids, table: jax.nn.one_hot(ids, 8).astype(jnp.bfloat16) @ table.astype(jnp.bfloat16),
        "table, ab,bc->ac, looked up",
    ),
    "one_hot of a mixture": (lambda ids, table, x: (
        jax.nn.one_hot(ids, 8) * x.sum()) @ table, "table, ab,bc->ac"),
    "the other one is made of parameters and of x": (lambda x, w, v: (x + w[:2]) @ v, V),
    "added to a parameter before": (lambda x, w: (x + 1) @ w + w[:2], W),
    "integers": (
        lambda ids, w: jnp.stack([ids, ids]) @ w[:2].astype(jnp.int32), f"{W}, {_weights.NOT_FLOAT}"
    ),
    "an outer product": (
        lambda x, s: jnp.einsum("b,d->bd", x[:, 0], s), f"s, a,b->ab, {_weights.NOTHING_SUMMED}"
    ),
    "groups of what is summed": (
        lambda xs, ws: lax.ragged_dot_general(xs[0].T, ws[0, :2], jnp.array([1, 0, 1]),
            lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], [])),
        f"ws, ragged td,edf->tf, {_weights.NO_ROWS}",
    ),
}  # fmt: skip

NO_WEIGHTS = {
    "activations": (lambda x: x @ x.T,),
    "scores of attention": (lambda x, w, v: (x @ w) @ (x @ v).T, W, V),
    "products of parameters alone": (lambda x, w, v: x + (w @ v)[:2],),
    "constants times parameters": (lambda x, w: x + jnp.ones((2, 4)) @ w,),
    "element by element": (lambda x, s: x * s[None],),
    "statistics of inputs": (lambda x, w: (x @ w) @ jnp.cov(x.T), W),
    "noise of a key": (lambda x, w, n: x @ (w + jax.random.normal(jax.random.key(n), ())),),
    "a mask that is computed": (lambda x, w: x @ jnp.where(x[0] > 0, w, 0.0),),
    "experts by token": (lambda x, ws, ids: jnp.einsum("td,tdf->tf", x, ws[ids]),),
    "a slice by an input": (lambda x, ws, n: x @ ws[n],),
    "a branch by an input": (lambda x, w, v, n: x @ lax.cond(n > 0, lambda: w, lambda: v),),
    "as many times as an input says": (
        lambda x, w, n: x @ lax.fori_loop(0, n, lambda _, w: 2 * w, w),
    ),
    "lookup": (lambda ids, table: table[ids] @ table[ids].T,),
}


multiply = jax.jit(jnp.matmul)


def scan(body, carry, split, **options):
    return lax.scan(lambda c, s: (body(c, s), None), carry, split, **options)[0]


def on_a_mesh(x, w):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = (jax.P("data"), jax.P())
    return jax.shard_map(multiply, mesh=mesh, in_specs=specs, out_specs=specs[0])(x, w)


def switch(n, x, w, v):
    return lax.switch(n, [lambda x: x @ w, lambda x: x @ v @ v, lambda x: x], x)


CALLS = {
    "jit": (lambda x, w: multiply(x, w), W),
    "jit, called twice": (lambda x, w, v: multiply(multiply(x, w), v), W, V),
    "a weight that jit makes": (lambda x, w: x @ jax.jit(jnp.transpose)(w), W),
    "remat": (jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w), W, W),
    "a replay by remat": (
        lambda x, w: jax.grad(lambda x: jnp.sin(jax.checkpoint(multiply)(x, w)).sum())(x), W
    ),
    "vmap": (jax.vmap(lambda x, w: x @ w, (0, None)), W),
    "vmap of both": (jax.vmap(lambda xs, ws: xs @ ws), "ws, abc,acd->abd"),
    "a gradient": (
        lambda x, w: jax.grad(lambda x: jnp.sin(x @ w).sum())(x), W, "w, ab,cb->ac"
    ),
    "shard_map": (on_a_mesh, W),
    "switch": (switch, W, V, V),
    "cond of activations": (lambda n, x, w: lax.cond(n > 0, lambda: x, lambda: -x) @ w, W),
    "cond by a parameter": (
        lambda x, w, v, s: x @ lax.cond(s[0] > 0, lambda: w, lambda: v), "w+v+s, ab,bc->ac"
    ),
    "while": (
        lambda x, w: lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x), W
    ),
    "what ends a while": (
        lambda x, w: lax.while_loop(lambda x: (x @ w).sum() < 9, lambda x: x + 1, x), W
    ),
    "a while that carries a weight": (
        lambda x, w: lax.while_loop(
            lambda c: c[0].sum() < 9, lambda c: (c[0] @ c[1], c[1]), (x, w)
        ),
        W,
    ),
    "a stack": (lambda x, ws: scan(lambda x, w: x @ w, x, ws), f"{WS}, in [3]"),
    "fori_loop": (
        lambda x, ws: lax.fori_loop(0, 3, lambda i, x: x @ ws[i], x), f"{WS}, in [3]"
    ),
    "a loop that closes over a weight": (
        lambda xs, w: scan(lambda c, x: c + x @ w, 0.0 * xs[0], xs), f"{W}, in [3]"
    ),
    "a loop that carries a weight": (
        lambda xs, w: scan(lambda c, x: (c[0] + x @ c[1], c[1]), (0.0 * xs[0], w), xs),
        f"{W}, in [3]",
    ),
    "a weight that decays": (
        lambda xs, w: scan(lambda c, x: (c[0] + x @ c[1], c[1] / 2), (0.0 * xs[0], w), xs),
        f"{W}, in [3]",
    ),
    "two weights that change places": (
        lambda xs, w, v: scan(lambda c, x: (c[0] + x @ c[1], c[2], c[1]), (xs[0], w, v), xs),
        f"{BOTH}, in [3]",
    ),
    "a carry that begins as a weight": (
        lambda xs, w, v: scan(lambda h, x: jnp.tanh(h @ v) + x, w[:2], xs), f"{V}, in [3]"
    ),
    "fast weights": (
        lambda xs, w: scan(lambda c, x: (x @ c[1], c[1] + x.T @ x), (xs[0], w), xs),
    ),
    "a scan in a scan": (
        lambda xs, ws, v: scan(lambda x, y: scan(jnp.matmul, x + y, ws) @ v, xs[0], xs[:2]),
        f"{WS}, in [2, 3]", f"{V}, in [2]",
    ),
    "remat in a scan in jit": (
        jax.jit(lambda x, ws: scan(jax.checkpoint(lambda x, w: jnp.sin(x @ w)), x, ws)),
        f"{WS}, in [3]",
    ),
    "a loop in a branch": (
        lambda n, x, ws: lax.cond(n > 0, lambda: scan(jnp.matmul, x, ws), lambda: x),
        f"{WS}, in [3]",
    ),
    "map": (lambda xs, w: lax.map(lambda x: x @ w, xs), f"{W}, in [3]"),
    "an associative scan": (
        lambda xs, ws: xs @ lax.associative_scan(jnp.matmul, ws), "ws, abc,acd->abd"
    ),
}  # fmt: skip


@jax.custom_vjp
def own_gradient(x, w):
    return x @ w


own_gradient.defvjp(lambda x, w: (x @ w, (x, w)), lambda xw, g: (g @ xw[1].T, xw[0].T @ g))


@jax.custom_jvp
def own_tangent(x, w):
    return x @ w


own_tangent.defjvp(lambda primals, tangents: (own_tangent(*primals), tangents[0] @ primals[1]))


def kernel(x, w):
    def body(x, w, y):
        y[...] = x[...] @ w[...]

    return pl.pallas_call(body, out_shape=jax.typeof(x), interpret=True)(x, w)


def elementwise_kernel(x, w):
    def body(w, y):
        y[...] = 2 * w[...]

    return x @ pl.pallas_call(body, out_shape=jax.typeof(w), interpret=True)(w)


def callback(x, w):
    return jax.pure_callback(lambda x, w: np.asarray(x) @ np.asarray(w), jax.typeof(x), x, w)


def reference(x, w):
    ref = jax.new_ref(x)
    ref[...] = x @ w
    return ref[...]


def convolution(xs, ws):
    return lax.conv_general_dilated(
        xs, ws[:2], (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
    )


HIDDEN = {
    "custom_vjp": (own_gradient, f"w: {_weights.OWN_DERIVATIVE}"),
    "custom_jvp": (own_tangent, f"w: {_weights.OWN_DERIVATIVE}"),
    "custom_vjp of a weight": (
        lambda x, w, v: x @ own_gradient(w, v),
        f"w: {_weights.OWN_DERIVATIVE}",
        f"v: {_weights.OWN_DERIVATIVE}",
    ),
    "a kernel": (kernel, f"w: {_weights.OPAQUE}"),
    "a kernel without a matmul": (elementwise_kernel, W),
    "a callback": (callback, f"w: {_weights.OPAQUE}"),
    "a reference": (reference, f"w: {_weights.OPAQUE}"),
    "a convolution": (convolution, f"ws: {_weights.CONVOLUTION}"),
    "beside others": (
        lambda x, w, v: own_gradient(x @ v, w) @ v, V, V, f"w: {_weights.OWN_DERIVATIVE}"
    ),
}  # fmt: skip

CASES = OPERATIONS | WEIGHTS | NO_WEIGHTS | CALLS | HIDDEN


@pytest.mark.parametrize("name", CASES)
def test_rows(name):
    function, *expected = CASES[name]
    assert rows(function) == expected


def test_sizes_and_operations():
    weights, _ = read(lambda xs, ws, v: (jnp.einsum("htd,hdf->htf", xs, ws), v[:, :3].T @ xs[0].T))
    first, second = weights.matmuls
    assert (first.size, first.flops) == (((2, 4, 4), 3), 3 * 2 * 2 * 4 * 4)
    assert (second.size, second.flops) == (((2, 4, 3), 1), 2 * 2 * 4 * 3)
    (grouped,) = read(ragged)[0].matmuls
    assert (grouped.size, grouped.flops) == (((2, 4, 4), 1), 2 * 2 * 4 * 4)
    (looped,) = read(lambda x, ws: scan(jnp.matmul, x, ws))[0].matmuls
    assert (looped.size, looped.flops) == (((2, 4, 4), 1), 3 * 2 * 2 * 4 * 4)


def test_the_order_of_first_uses():
    """Also of parameters that multiply nothing, and of those that somebody hides."""
    weights, known = read(
        lambda x, w, v, s, table, ids: own_gradient(x + s[None], v) @ w + table[ids]
    )
    (matmul,) = weights.matmuls
    times = {known[number]: time for number, time in weights.times.items()}
    assert times["s"] < times["v"] < matmul.time <= times["w"] < times["table"]
    assert weights.tables == {8}


def test_layers_are_read_by_others():
    def function(x, w, v):
        with layer_scope("up"):
            x = x @ w
        return x @ v

    weights, known = read(function)
    assert [known[n] for matmul in weights.matmuls for n in matmul.parameters] == ["v"]
    assert weights.times[known.index("w")] == 0
