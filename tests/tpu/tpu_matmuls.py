"""Features for `tpu_program.py`: recipes, operations and transformations of JAX, on one device."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jaxfp8 as fp8
from jaxfp8.state._state import map_states

# All different, so that the shape of an operand says which tensor it is. Multiples of 128, so that
# nothing is padded.
M, K, N = 512, 256, 384


class Feature(NamedTuple):
    """A function to compile.

    Attributes:
      function: what is compiled.
      arguments: trees of types. Those without a sharding go to the first device.
      mesh: the mesh that is set while the function is traced.
      donate: which arguments are donated.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Any = None
    donate: tuple[int, ...] = ()


Rows = dict[str, Callable[[list[Any]], Feature]]
"""Features by name. Each is made of the devices of a chip."""


def one(make: Callable[..., Feature], *given: Any, **named: Any) -> Callable[[list[Any]], Feature]:
    """A row that is the same for all devices."""
    return lambda _: make(*given, **named)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


KEY = jax.eval_shape(lambda: jax.random.key(0))


def state_of(recipe: fp8.Recipe, *stacked: int, settled: bool = False) -> Any:
    """The type of a first state, stacked along leading axes."""
    state = jax.eval_shape(lambda: fp8.init_state(recipe))
    if settled:
        state = map_states(lambda each: dataclasses.replace(each, settled=True), state)
    return jax.tree.map(lambda leaf: array(*stacked, *leaf.shape, dtype=leaf.dtype), state)


def size_of(y: Any) -> jax.Array:
    """A loss whose gradient depends on y, as in a network."""
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def training(forward: Callable[..., Any], params: Any, state: Any, *rest: Any) -> Feature:
    """The loss, the gradients and the next state of `forward(params, state, *rest)`."""

    def step(params: Any, state: Any, *rest: Any) -> Any:
        loss = lambda params, state: size_of(forward(params, state, *rest))
        return fp8.value_and_grad(loss)(params, state)

    return Feature(step, (params, state, *rest))


def dense(
    recipe: fp8.Recipe, *, dtype: Any = jnp.bfloat16, settled: bool = False, **options: Any
) -> Feature:
    """One dense layer."""

    def forward(params: Any, state: Any, *key: Any) -> Any:
        named = {"key": key[0]} if key else {}
        return fp8.dot(*params, recipe=recipe, state=state, **named, **options)

    params = array(M, K, dtype=dtype), array(K, N, dtype=dtype)
    key = (KEY,) if "stochastic" in repr(recipe) else ()
    return training(forward, params, state_of(recipe, settled=settled), *key)


E4M3, E5M2 = fp8.E4M3, fp8.E5M2
SCALES = {"x_scale": 0.011, "w_scale": 0.0023, "g_scale": 1.1e-4}
STOCHASTIC = {"gradient_rounding": "stochastic"}
PRESETS: dict[str, dict[str, Any]] = {
    "delayed": {}, "current": {}, "rowwise": {}, "blockwise": {}, "mxfp8": {}, "static": SCALES,
}  # fmt: skip
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("delayed", {"gradient": E4M3}),
    ("delayed", {"power_of_two": True}),
    ("delayed", {"margin": 1}),
    ("delayed", {"algorithm": "most_recent"}),
    ("delayed", STOCHASTIC),
    ("current", {"gradient": E4M3}),
    ("current", {"power_of_two": True}),
    ("current", STOCHASTIC),
    ("rowwise", {"gradient": E5M2}),
    ("rowwise", {"power_of_two": False}),
    ("rowwise", {"high_precision_wgrad": True}),
    ("rowwise", STOCHASTIC),
    ("blockwise", {"gradient": E5M2}),
    ("blockwise", {"power_of_two": False}),
    ("blockwise", {"w_tile_dim": 1}),
    ("blockwise", {"x_tile_dim": 2, "w_tile_dim": 1}),
    ("blockwise", {"g_tile_dim": 2, "w_tile_dim": 1}),
    ("blockwise", STOCHASTIC),
    ("mxfp8", {"scale_rounding": "floor"}),
    ("mxfp8", {"w_tile_dim": 2}),
    ("mxfp8", STOCHASTIC),
    ("static", SCALES | STOCHASTIC),
]


def words_of(name: str, fields: dict[str, Any]) -> str:
    shown = {key: value for key, value in fields.items() if key not in SCALES}
    return f"{name}({', '.join(f'{key}={value}' for key, value in shown.items())})"


def preset(name: str) -> fp8.Recipe:
    return fp8.recipes.get(name, **PRESETS[name])


def recipes() -> Rows:
    rows = {
        f"recipe: {words_of(name, fields)}": one(dense, fp8.recipes.get(name, **fields))
        for name, fields in [*PRESETS.items(), *OPTIONS]
    }
    rows["recipe: delayed(), settled"] = one(dense, preset("delayed"), settled=True)
    for name in ("delayed", "rowwise", "blockwise"):
        rows[f"recipe: {name}(), float32"] = one(dense, preset(name), dtype=jnp.float32)
    rows["recipe: current(), float16"] = one(dense, preset("current"), dtype=jnp.float16)
    for name in ("current", "blockwise"):
        kernels = fp8.Kernels("tpu7x")
        rows[f"recipe: {name}(), Kernels('tpu7x')"] = one(dense, preset(name), kernels=kernels)
    return rows


# Operations.


def batched(name: str) -> Feature:
    recipe, numbers = preset(name), (((2,), (1,)), ((0,), (0,)))
    forward = lambda params, state: fp8.dot_general(*params, numbers, recipe=recipe, state=state)
    return training(forward, (array(4, M, K), array(4, K, N)), state_of(recipe))


def einsum(equation: str, *shapes: tuple[int, ...], name: str) -> Feature:
    recipe = preset(name)
    forward = lambda params, state: fp8.einsum(equation, *params, recipe=recipe, state=state)
    return training(forward, tuple(array(*shape) for shape in shapes), state_of(recipe))


def prologue(name: str, kind: str) -> Feature:
    recipe = preset(name)
    made = fp8.prologues.SwiGLU() if kind == "SwiGLU" else fp8.prologues.RMSNorm(epsilon=1e-6)
    second = array(M, K) if kind == "SwiGLU" else array(K, dtype=jnp.float32)

    def forward(params: Any, state: Any) -> Any:
        *x, w = params
        return fp8.dot(tuple(x), w, recipe=recipe, state=state, prologue=made)

    return training(forward, (array(M, K), second, array(K, N)), state_of(recipe))


def biased(name: str) -> Feature:
    recipe = preset(name)
    forward = lambda params, state: fp8.dot(*params[:2], recipe=recipe, state=state, bias=params[2])
    return training(forward, (array(M, K), array(K, N), array(N)), state_of(recipe))


def ragged(name: str) -> Feature:
    recipe, experts = preset(name), 4

    def forward(params: Any, state: Any, sizes: Any) -> Any:
        return fp8.ragged_dot(*params, sizes, recipe=recipe, state=state)

    params = array(M, K), array(experts, K, N)
    return training(forward, params, state_of(recipe), array(experts, dtype=jnp.int32))


GRANULARITIES = {
    "PerTensor()": fp8.PerTensor(),
    "PerAxis(0)": fp8.PerAxis(0),
    "PerBlock((1, 128))": fp8.PerBlock((1, 128)),
    "PerBlock((128, 128))": fp8.PerBlock((128, 128)),
}
MX = {"power_of_two": True, "scale_format": fp8.E8M0, "scale_rounding": "rceil"}


def cast(format: Any, granularity: Any, **options: Any) -> Feature:
    """Quantize, and dequantize."""

    def function(x: jax.Array) -> Any:
        q = fp8.quantize(x, format, granularity, **options)
        return q.values, q.scale, q.dequantize(jnp.float32), q.dequantize()

    return Feature(function, (array(M, K),))


def fake(format: Any, granularity: Any, **options: Any) -> Feature:
    """The value of `fake_quantize`, and its gradient."""

    def function(x: jax.Array, c: jax.Array) -> Any:
        value, pull_back = jax.vjp(
            lambda x: fp8.fake_quantize(x, format, granularity, **options), x
        )
        return value, *pull_back(c)

    return Feature(function, (array(M, K), array(M, K)))


def stochastic_cast() -> Feature:
    return Feature(
        lambda x, key: fp8.quantize(x, E5M2, fp8.PerTensor(), rounding="stochastic", key=key),
        (array(M, K), KEY),
    )


def scaled(granularities: tuple[Any, Any], **options: Any) -> Feature:
    def function(x: jax.Array, w: jax.Array) -> Any:
        lhs, rhs = (
            fp8.quantize(each, E4M3, granularity, **options)
            for each, granularity in zip((x, w), granularities, strict=True)
        )
        with jax.named_scope("jaxfp8.fprop"):  # so that it is counted
            return fp8.scaled_matmul(lhs, rhs)

    return Feature(function, (array(M, K), array(K, N)))


def operations() -> Rows:
    scores = ("bqhd,bkhd->bhqk", (2, 128, 4, 128), (2, 256, 4, 128))
    heads = ("bsd,dhf->bhsf", (2, 128, K), (K, 4, 128))
    rows: Rows = {}
    for name in PRESETS:
        rows[f"op: dot_general with a batch axis, {name}"] = one(batched, name)
    for name in ("delayed", "rowwise", "mxfp8"):
        for given in (scores, heads):
            rows[f"op: einsum {given[0]}, {name}"] = one(einsum, *given, name=name)
        rows[f"op: bias, {name}"] = one(biased, name)
    for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8"):
        rows[f"op: ragged_dot, {name}"] = one(ragged, name)
    for kind in ("SwiGLU", "RMSNorm"):
        for name in ("current", "blockwise"):
            rows[f"op: prologue {kind}, {name}"] = one(prologue, name, kind)
    original = {"save_original": ("x", "w")}
    rows["op: save_original=x, w, current"] = one(dense, preset("current"), **original)
    tensors, rows_and_columns = (fp8.PerTensor(),) * 2, (fp8.PerAxis(0), fp8.PerAxis(1))
    tiles = fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128))
    rows["op: scaled_matmul of tensors"] = one(scaled, tensors)
    rows["op: scaled_matmul of rows"] = one(scaled, rows_and_columns)
    rows["op: scaled_matmul of tiles"] = one(scaled, tiles, power_of_two=True)
    return rows


def casts() -> Rows:
    rows: Rows = {}
    for granularity in (
        *map(fp8.PerBlock, ((1, 128), (128, 128))),
        fp8.PerTensor(),
        fp8.PerAxis(0),
    ):
        for format in (E4M3, E5M2):
            rows[f"cast: quantize, dequantize, {format} {granularity}"] = one(
                cast, format, granularity
            )
        rows[f"cast: fake_quantize, E4M3 {granularity}"] = one(fake, E4M3, granularity)
    mx = fp8.PerBlock((1, 32))
    rows[f"cast: quantize, dequantize, E4M3 {mx}, E8M0"] = one(cast, E4M3, mx, **MX)
    rows[f"cast: fake_quantize, E4M3 {mx}, E8M0"] = one(fake, E4M3, mx, **MX)
    rows["cast: stochastic rounding"] = one(stochastic_cast)
    return rows


# Transformations of JAX. `L` layers of x [M, K] -> [M, N] -> [M, K].

L = 3


def block(recipe: fp8.Recipe, h: jax.Array, weights: Any, states: Any) -> jax.Array:
    up = fp8.dot(h, weights[0], recipe=recipe, state=states[0])
    return h + fp8.dot(jax.nn.relu(up), weights[1], recipe=recipe, state=states[1])


def scanned(name: str, remat: Any = "none") -> Feature:
    recipe = preset(name)

    def body(h: jax.Array, of: Any) -> tuple[jax.Array, None]:
        run = lambda h, weights, states: block(recipe, h, weights, states)
        if remat != "none":
            run = jax.checkpoint(run, policy=remat, prevent_cse=False)
        return run(h, *of), None

    forward = lambda params, states, x: lax.scan(body, x, (params, states))[0]
    params, states = (array(L, K, N), array(L, N, K)), (state_of(recipe, L),) * 2
    return training(forward, params, states, array(M, K))


def rematerialized(name: str) -> Feature:
    recipe = preset(name)
    run = jax.checkpoint(lambda x, weights, states: block(recipe, x, weights, states))
    forward = lambda params, states, x: run(x, params, states)
    states = (state_of(recipe),) * 2
    return training(forward, (array(K, N), array(N, K)), states, array(M, K))


def vmapped(name: str, *, experts: bool) -> Feature:
    """Over examples of one weight, or over experts with their own weights and states."""
    recipe = preset(name)
    dot = lambda x, w, state: fp8.dot(x, w, recipe=recipe, state=state)
    forward = lambda w, state, x: jax.vmap(dot, (0, 0, 0) if experts else (0, None, None))(
        x, w, state
    )
    stacked = (4,) if experts else ()
    w, state = array(*stacked, K, N), state_of(recipe, *stacked)
    return training(forward, w, state, array(4, M, K))


def microbatches(name: str, *, weights_once: bool) -> Feature:
    """Gradients of four microbatches, which are summed, with one commit."""
    recipe = preset(name)

    def step(w: Any, state: Any, batches: Any) -> Any:
        read = w
        if weights_once:
            rules = [("w", fp8.weights.WeightAxes())]
            read = fp8.quantize_params(w, recipe, rules=rules, state=state, dtype=jnp.bfloat16)
        loss = lambda w, state, x: size_of(fp8.dot(x, w["w"], recipe=recipe, state=state["w"]))
        run = fp8.value_and_grad(loss, commit=False)

        def one_batch(carry: Any, x: Any) -> Any:
            total, seen = carry
            value, grads, now = run(read, state, x)
            total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
            return (total, fp8.merge_seen(seen, now)), value

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), w)
        (total, seen), losses = lax.scan(one_batch, (zeros, fp8.nothing_seen(state)), batches)
        return losses, total, fp8.commit(state, seen)

    return Feature(step, ({"w": array(K, N)}, {"w": state_of(recipe)}, array(4, M, K)))


def by_gradient() -> Feature:
    """The next state in the place of the gradient of the state."""
    recipe = preset("delayed")

    def loss(w: Any, state: Any, x: Any) -> Any:
        return size_of(fp8.dot(x, w, recipe=recipe, state=state, state_channel="gradient"))

    return Feature(
        jax.value_and_grad(loss, argnums=(0, 1)), (array(K, N), state_of(recipe), array(M, K))
    )


def donated() -> Feature:
    """A step of SGD whose weight and state are donated."""
    recipe = preset("delayed")

    def step(w: Any, state: Any, x: Any) -> Any:
        loss = lambda w, state: size_of(fp8.dot(x, w, recipe=recipe, state=state))
        value, grads, state = fp8.value_and_grad(loss)(w, state)
        return w - jnp.bfloat16(1e-3) * grads, state, value

    return Feature(step, (array(K, N), state_of(recipe), array(M, K)), donate=(0, 1))


def transformations() -> Rows:
    rows: Rows = {}
    for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8"):
        rows[f"jax: scan and checkpoint, {name}"] = one(scanned, name, None)
    for name in ("delayed", "mxfp8"):
        rows[f"jax: scan, {name}"] = one(scanned, name)
        rows[f"jax: checkpoint, {name}"] = one(rematerialized, name)
        for words, given in (
            ("inputs=False", {"inputs": False}),
            ("", {}),
            ("weights=True", {"weights": True}),
        ):
            policy = fp8.save_fp8_residuals(**given)
            rows[f"jax: scan, save_fp8_residuals({words}), {name}"] = one(scanned, name, policy)
        rows[f"jax: vmap of examples, {name}"] = one(vmapped, name, experts=False)
        rows[f"jax: vmap of experts, {name}"] = one(vmapped, name, experts=True)
        rows[f"jax: microbatches, {name}"] = one(microbatches, name, weights_once=False)
        rows[f"jax: microbatches, quantize_params, {name}"] = one(
            microbatches, name, weights_once=True
        )
    rows["jax: state_channel='gradient', delayed"] = one(by_gradient)
    rows["jax: donated arguments, delayed"] = one(donated)
    return rows
