"""A state in the middle of a run, ways to save it, and edits of the file that no step could
make.
"""

import dataclasses
import functools

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

import jaxfp8 as fp8
from jaxfp8.state._state import LEAVES

H, LAYERS, K, B = 4, 2, 4, 8


def recipe(**fields):
    return fp8.recipes.delayed(**{"history_length": H} | fields)


def fresh(recipe):
    """The states of one layer, and of two in a stack."""
    stack = jax.vmap(lambda _: fp8.init_state(recipe))(jnp.zeros(LAYERS))
    return {"one": fp8.init_state(recipe), "stack": stack}


def loss(recipe, params, states, x):
    y = fp8.dot(x, params["one"], recipe=recipe, state=states["one"])
    body = lambda y, each: (fp8.dot(y, each[0], recipe=recipe, state=each[1]), None)
    return jnp.sum(jax.lax.scan(body, y, (params["stack"], states["stack"]))[0] ** 2)


@functools.cache
def step(recipe):
    """A training step, a function of the states."""
    random = np.random.default_rng(0)
    shapes = {"one": (K, K), "stack": (LAYERS, K, K)}
    params = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    run = jax.jit(fp8.value_and_grad(functools.partial(loss, recipe)))
    return functools.partial(run, params, x=random.normal(size=(B, K)).astype(np.float32))


@functools.cache
def trained(recipe, steps):
    """States after so many steps, as nested dicts of NumPy arrays: what a file holds."""
    random, states = np.random.default_rng(1), fresh(recipe)
    commit = jax.jit(fp8.commit)
    for _ in range(steps):
        saw = lambda leaf: random.uniform(1, 8, leaf.shape).astype(np.float32)
        states = commit(states, jax.tree.map(saw, fp8.nothing_seen(states)))
    return {
        name: {leaf: np.asarray(getattr(state, leaf)) for leaf in LEAVES}
        for name, state in states.items()
    }


# -------------------------------------------------------------------------------------- three files
class Flax:
    """`flax.serialization`: its hook checks."""

    def __init__(self, saved, path):
        self.blob = flax.serialization.msgpack_serialize(saved)

    def restore(self, like):
        return flax.serialization.from_bytes(like, self.blob)

    def read(self):
        return flax.serialization.msgpack_restore(self.blob)


class Orbax:
    def __init__(self, saved, path):
        self.path = path / "orbax"
        state = fp8.init_state(recipe())
        whole = {
            name: dataclasses.replace(state, **leaves) if set(leaves) == set(LEAVES) else leaves
            for name, leaves in saved.items()
        }
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.path, whole)

    def read(self):
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(self.path)

    def restore(self, like):
        """As docs/state.md does it.

        Orbax has errors of its own for another tree and for other shapes.
        """
        read = self.read()
        wanted = {
            name: {leaf: getattr(state, leaf).shape for leaf in LEAVES}
            for name, state in like.items()
        }
        shapes = {
            name: {leaf: np.shape(state[leaf]) for leaf in LEAVES if leaf in state}
            for name, state in read.items()
        }
        if shapes == wanted:
            with ocp.StandardCheckpointer() as checkpointer:
                read = checkpointer.restore(self.path, like)
        return fp8.check_state(read, like)


class Npz:
    def __init__(self, saved, path):
        self.path = path / "state.npz"
        self.names = list(saved)
        # npz has no bfloat16: what it gives back is bytes without a type.
        np.savez(
            self.path,
            **{
                f"{name}/{leaf}": value
                for name, leaves in saved.items()
                for leaf, value in leaves.items()
            },
        )

    def read(self):
        with np.load(self.path) as file:
            return {
                name: {key.split("/")[1]: file[key] for key in file if key.startswith(f"{name}/")}
                for name in self.names
            }

    def restore(self, like):
        return fp8.check_state(self.read(), like)


FILES = {"flax": Flax, "orbax": Orbax, "npz": Npz}


# -------------------------------------------------------------------------------------------- edits
def put(name, leaf, index, change):
    """One value of one array: a number, or a function of what was there."""

    def edit(saved):
        array = saved[name][leaf].copy()
        array[index] = change(array[index]) if callable(change) else change
        return {**saved, name: {**saved[name], leaf: array}}

    return edit


def replace(name, leaf, change):
    """A whole array, by a function of what was there."""
    return lambda saved: {**saved, name: {**saved[name], leaf: change(saved[name][leaf])}}


def cast(dtype):
    """A whole state, as `jax.tree.map` over all variables casts it."""
    return lambda saved: {
        **saved,
        "one": {leaf: value.astype(dtype) for leaf, value in saved["one"].items()},
    }


def by(factor):
    return lambda value: value * np.float32(factor)


NAN, INF = np.float32("nan"), np.float32("inf")
PLACES = {"one, x": ("one", (0,)), "stack 1, g": ("stack", (1, 2))}
SCALES = {
    "nan": NAN,
    "inf": INF,
    "-inf": -INF,
    "negative": by(-1),
    "unset": 0.0,
    "2^127": 2.0**127,
    "subnormal": 1e-40,
    "half": by(0.5),
    "2^-20": by(2.0**-20),
    "2^21": by(2.0**21),
    "1e30": 1e30,
}
AMAXES = {"nan": NAN, "inf": INF, "-inf": -INF, "negative": by(-1), "subnormal": 1e-40}
COUNTS = {"nan": NAN, "inf": INF, "negative": -1.0, "half a step": 0.5}
NAMES = {"nan": NAN, "zero": 0.0, "half": by(0.5), "2^-18 more": by(1 + 2.0**-18)}

EDITS = {
    **{
        f"{place}: scale {what}": put(name, "scale", at, change)
        for place, (name, at) in PLACES.items()
        for what, change in SCALES.items()
    },
    **{
        f"{place}: slot {slot} {what}": put(name, "amax_history", (*at, slot), change)
        for place, (name, at) in PLACES.items()
        for slot in (1, 3)
        for what, change in AMAXES.items()
    },
    **{
        f"{place}: staged": put(name, "amax_history", (*at, 0), 1.0)
        for place, (name, at) in PLACES.items()
    },
    **{
        f"{place}: newest lost": put(name, "amax_history", (*at, 3), 0.0)
        for place, (name, at) in PLACES.items()
    },
    **{
        f"{place}: a gap": put(name, "amax_history", (*at, 2), 0.0)
        for place, (name, at) in PLACES.items()
    },
    **{
        f"{place}: history lost": put(name, "amax_history", at, 0.0)
        for place, (name, at) in PLACES.items()
    },
    **{
        f"{place}: a larger amax": put(name, "amax_history", (*at, 3), by(2.0**10))
        for place, (name, at) in PLACES.items()
    },
    **{
        f"{place}: count {what}": put(name, "nonfinite_steps", at, change)
        for place, (name, at) in PLACES.items()
        for what, change in COUNTS.items()
    },
    **{
        f"{place}: fingerprint {what}": put(name, "fingerprint", at, change)
        for place, (name, at) in PLACES.items()
        for what, change in NAMES.items()
    },
    "rows exchanged": lambda saved: {
        **saved,
        "one": {leaf: value[::-1] for leaf, value in saved["one"].items()},
    },
    "cast to bfloat16": cast(ml_dtypes.bfloat16),
    "cast to float16": cast(np.float16),
    "cast to int32": cast(np.int32),
    "cast to float64": cast(np.float64),
    "a scale in float64": replace("stack", "scale", lambda a: a.astype(np.float64)),
    "history of 2": replace("one", "amax_history", lambda a: a[:, :2]),
    "history of 16": replace("one", "amax_history", lambda a: np.pad(a, ((0, 0), (12, 0)))),
    "5 rows of history": replace("one", "amax_history", lambda a: np.concatenate([a, a[:2]])),
    "2 rows of scales": replace("one", "scale", lambda a: a[:2]),
    "layers last": lambda saved: {
        **saved,
        "stack": {leaf: np.moveaxis(value, 0, 1) for leaf, value in saved["stack"].items()},
    },
    "3 layers": lambda saved: {
        **saved,
        "stack": {leaf: np.concatenate([v, v[:1]]) for leaf, v in saved["stack"].items()},
    },
    "a single layer for the stack": lambda saved: {**saved, "stack": saved["one"]},
    "flat history": replace("one", "amax_history", lambda a: a.reshape(-1)),
    **{
        f"no {leaf}": lambda saved, leaf=leaf: {
            **saved,
            "one": {k: v for k, v in saved["one"].items() if k != leaf},
        }
        for leaf in LEAVES
    },
}
