"""Training steps with `fp8.Kernels(chip)`, compiled for that chip: what runs in them."""

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from program import Program
from targets import array, check_one_chip, state_of, topology

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8DenseGeneral, FP8EinsumOp

M, K, N = 16384, 4096, 8192
DEVICES = (4, 2)
MESHES = ("Auto", "Explicit", "shard_map")


def what_runs(compiled):
    """How often the steady state of a program has each kind of cast and of matmul."""
    program, found = Program(compiled.as_text()), collections.Counter()
    steady = program.entry
    for each in program.instructions(steady, into_fusions=True):
        target = each.attributes if each.op == "custom-call" else ""
        if 'target="mosaic_gpu' in target:
            is_matmul = any(f"jaxfp8.{name}" in target for name in ("fprop", "dgrad", "wgrad"))
            found["matmul in Pallas" if is_matmul else "cast in Pallas"] += 1
        elif '"__cublas$lt$matmul$f8"' in target:
            found["cuBLASLt, FP8"] += 1
        elif '"__cudnn$blockScaledDot"' in target:
            found["cuDNN, block-scaled"] += 1
    found["bfloat16"] += len(program.other_matmuls(steady))
    return +found


def compiled(mesh, recipe, chip, step, arguments):
    with jax.set_mesh(mesh):
        run = jax.jit(step, compiler_options=fp8.Kernels(chip).compiler_options(recipe))
        lowered = run.lower(*arguments)
        check_one_chip(chip, lowered)
        return lowered.compile()


def trained(module, recipe, x, out_shape):
    """A step of a linen module, its types of parameters, state and inputs."""
    variables = jax.eval_shape(module.init, jax.random.key(0), x)

    def step(params, state, x, c):
        def loss(params, state):
            y = module.apply({"params": params["own"], COLLECTION: state}, params["x"])
            return jnp.sum((y * c).astype(jnp.float32))

        return fp8.value_and_grad(loss)({"own": params, "x": x}, state)

    return step, (variables["params"], variables.get(COLLECTION, {}), x, array(*out_shape))


def dense(recipe, kernels):
    layer = FP8Dense(N, recipe=recipe, kernels=kernels, dtype=jnp.bfloat16)
    return trained(layer, recipe, array(M, K), (M, N))


def dense_general(recipe, kernels):
    layer = FP8DenseGeneral(
        (32, N // 32), axis=(-2, -1), recipe=recipe, kernels=kernels, dtype=jnp.bfloat16
    )
    return trained(layer, recipe, array(2, M // 2, 16, K // 16), (2, M // 2, 32, N // 32))


def einsum(recipe, kernels):
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.lecun_normal(), (K, 32, N // 32), jnp.bfloat16)
            return FP8EinsumOp(recipe, kernels=kernels)("bsd,dhk->bshk", x, w)

    return trained(Heads(), recipe, array(2, M // 2, K), (2, M // 2, 32, N // 32))


def scan(recipe, kernels):
    """Two layers [K, K] in a loop. The program has each of its calls once."""

    def loss(params, state, c):
        def layer(x, own):
            w, state = own
            return fp8.dot(x, w, recipe=recipe, state=state, kernels=kernels), None

        y, _ = lax.scan(layer, params[0], (params[1], state))
        return jnp.sum((y * c).astype(jnp.float32))

    def step(x, w, state, c):
        return fp8.value_and_grad(loss)((x, w), state, c)

    return step, (array(M, K), array(2, K, K), state_of(recipe, 2), array(M, K))


def dot(recipe, kernels, x, w, c, state):
    def loss(params, state):
        y = fp8.dot(*params, recipe=recipe, state=state, kernels=kernels)
        return jnp.sum((y * c).astype(jnp.float32))

    return fp8.value_and_grad(loss)((x, w), state)


DOORS = {"dense": dense, "DenseGeneral": dense_general, "einsum": einsum, "scan": scan}


def on_one_device(name, chip, door):
    recipe = fp8.recipes.get(name)
    mesh = Mesh(np.array(topology(chip).devices), ("a",), axis_types=(AxisType.Auto,))
    whole = lambda type: jax.ShapeDtypeStruct(
        type.shape, type.dtype, sharding=NamedSharding(mesh, P())
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # flax's
        step, arguments = DOORS[door](recipe, fp8.Kernels(chip))
        return what_runs(compiled(mesh, recipe, chip, step, jax.tree.map(whole, arguments)))


def on_a_mesh(name, chip, kind):
    """Tokens over four, columns of w over two."""
    recipe = fp8.recipes.get(name)
    axis_type = AxisType.Explicit if kind == "Explicit" else AxisType.Auto
    devices = np.array(topology(chip, "1x1x8").devices).reshape(DEVICES)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(axis_type,) * 2)
    specs = P("data"), P(None, "tensor"), P("data", "tensor"), P()
    types = array(M, K), array(K, N), array(M, N), state_of(recipe)

    def placed(type, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(type.shape, type.dtype, sharding=sharding)

    arguments = [
        jax.tree.map(lambda t, s=s: placed(t, s), t) for t, s in zip(types, specs, strict=True)
    ]
    step = functools.partial(dot, recipe, fp8.Kernels(chip))
    if kind == "shard_map":
        inside = step

        def step(*arguments):
            value, grads, state = inside(*arguments)
            return lax.psum(value, mesh.axis_names), grads, state

        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), specs[:2], specs[3]))
    return what_runs(compiled(mesh, recipe, chip, step, arguments))
