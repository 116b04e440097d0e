"""Every exact function of `numerics/`, in every context in which XLA may rewrite it.

XLA rewrites arithmetic where it knows more than that a number is a float32: that it is a constant,
that all values of an array are one scalar, what computed it, and what reads it. A context here
gives it one such thing to know. All functions are in one program, so that they also meet each
other.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax import lax

from jaxfp8.kernels.scaled_matmul._xla import _converted_factors_of
from jaxfp8.numerics._amax import amax, magnitude
from jaxfp8.numerics._exact import (
    divide,
    divide_in_integers,
    factors_of,
    is_finite,
    times,
    to_float32,
)
from jaxfp8.numerics._formats import E4M3, E5M2, E8M0
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.numerics._rounding import _built, _converted, kernel_cast
from jaxfp8.numerics._scale import (
    ScaleRule,
    encoding_multiplier,
    inverse,
    is_usable,
)

RULES = {
    "float32": ScaleRule(),
    "power_of_two": ScaleRule(power_of_two=True),
    "rceil": ScaleRule(scale_format=E8M0),
    "floor": ScaleRule(scale_format=E8M0, scale_rounding="floor"),
}
# Casts on CPUs, in kernels, and on other platforms. The first two convert.
CASTS = {
    "converted": lambda x, m, format: _converted(x, m, format=format),
    "kernel": kernel_cast,
    "built": lambda x, m, format: _built(x, m, format=format),
}
FORMATS = {"E4M3": E4M3, "E5M2": E5M2}

random = np.random.default_rng(0)
# Amaxes: the largest ones first, of which a rewritten division made inf. Values have up to twice
# their magnitude, so that some saturate.
AMAXES = np.concatenate([
    np.float32([3.4e38, 3e38, 8.6e37, 7, 1.3e-36, 1.2e-38, 448, 57344, 449, 0, np.inf, np.nan]),
    random.integers(0x00800000, 0x7F800000, 36, dtype=np.uint32).view(np.float32),
])  # fmt: skip
with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    VALUES = AMAXES * random.uniform(-2, 2, AMAXES.size).astype(np.float32)
    VALUES[[0, 5, 9, 10]] = AMAXES[1], -AMAXES[5], 1e-39, -0.0
FEW = slice(0, 12)


def functions(amaxes, values):
    """What each function makes of amaxes and values of one shape, by name: arrays of that shape."""
    found = {
        "is_usable": is_usable(amaxes),
        "is_finite": is_finite(values),
        "magnitude": magnitude(values),
        "to_float32": to_float32(values),
    }
    usable = lax.select(is_usable(amaxes), amaxes, jnp.full_like(amaxes, 448))
    for each in (divide, divide_in_integers):
        for numerator in (448.0, 0.8):
            found[f"{each.__name__} {numerator}"] = each(numerator, usable)
    for name, format in FORMATS.items():
        multiplier = encoding_multiplier(amaxes, format)
        found[f"{name} inverse of an inverse"] = inverse(inverse(multiplier))
        for rule, each in RULES.items():
            multiplier, scale = each.apply(amaxes, format)
            found[f"{name} {rule} multiplier"] = multiplier
            found[f"{name} {rule} scale"] = scale
            for how, cast in CASTS.items():
                found[f"{name} {rule} {how} cast"] = payload = cast(values, multiplier, format)
            for factors in (factors_of, _converted_factors_of):
                found[f"{name} {rule} {factors.__name__}"] = times(
                    payload.astype(jnp.float32), factors(scale)
                )
    return found


@functools.cache
def expected():
    """`functions(AMAXES, VALUES)` by the oracle."""
    usable = np.isfinite(AMAXES) & (AMAXES >= oracle.TINY)
    denominators = np.where(usable, AMAXES, 448).astype(np.float64)
    clipped = lambda q: np.clip(q, 2.0**-126, 2.0**126).astype(np.float32)
    found = {
        "is_usable": usable,
        "is_finite": np.isfinite(VALUES),
        "magnitude": np.where(np.isnan(VALUES), np.inf, np.abs(VALUES)).astype(np.float32),
        "to_float32": oracle.to_float32(VALUES),
    }
    for name in ("divide", "divide_in_integers"):
        found[f"{name} 448.0"] = clipped(448 / denominators)
        found[f"{name} 0.8"] = clipped(np.float64(np.float32(0.8)) / denominators)
    for name in FORMATS:
        multiplier = oracle.multiplier(AMAXES, name)
        found[f"{name} inverse of an inverse"] = oracle.inverse(oracle.inverse(multiplier))
        for rule in RULES:
            if rule in ("float32", "power_of_two"):
                multiplier = oracle.multiplier(AMAXES, name, power_of_two=rule == "power_of_two")
                scale = oracle.inverse(multiplier)
            else:
                byte = oracle.e8m0_bytes(AMAXES, name, rule)
                multiplier = np.ldexp(1.0, np.where(byte == 255, 0, 127 - byte.astype(int)))
                scale = np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(int) - 127))
            codes = oracle.cast(VALUES, multiplier.astype(np.float32), name)
            payload = codes.view(oracle.DTYPE[name]).astype(np.float64)
            found[f"{name} {rule} multiplier"] = multiplier
            found[f"{name} {rule} scale"] = scale
            for how in CASTS:
                found[f"{name} {rule} {how} cast"] = payload
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                product = (payload * scale).astype(np.float32)
            for factors in ("factors_of", "_converted_factors_of"):
                found[f"{name} {rule} {factors}"] = product
    return found


# Contexts: each takes `functions`, and returns its results for all pairs, or for the first ones.


def stacked(results):
    return {name: np.stack([each[name] for each in results]) for name in results[0]}


def of_each(program, pairs=FEW):
    """What a program makes of each pair."""
    both = zip(AMAXES[pairs], VALUES[pairs], strict=True)
    return stacked([jax.tree.map(np.asarray, program(a, v)) for a, v in both])


def last(tree):
    return jax.tree.map(lambda x: x[..., -1], tree)


def many(f):
    return jax.jit(f)(AMAXES, VALUES)


def eager(f):
    return f(jnp.asarray(AMAXES), jnp.asarray(VALUES))


def scalars(f):
    return of_each(jax.jit(f))


def arrays_of_one(f):
    return of_each(jax.jit(lambda a, v: last(f(a.reshape(1), v.reshape(1)))))


def a_broadcast_scalar(f):
    spread = functools.partial(jnp.broadcast_to, shape=(5,))
    return of_each(jax.jit(lambda a, v: last(f(spread(a), spread(v)))))


def a_broadcast_row(f):
    """A row of one value, as the scale of a tensor has it."""
    spread = functools.partial(jnp.broadcast_to, shape=(3, 4))
    return of_each(
        jax.jit(lambda a, v: last(last(f(spread(a.reshape(1, 1)), spread(v.reshape(1, 1))))))
    )


def constants(f):
    return jax.jit(lambda: f(jnp.asarray(AMAXES), jnp.asarray(VALUES)))()


def constant_amaxes(f):
    return jax.jit(lambda v: f(jnp.asarray(AMAXES), v))(VALUES)


def constant_values(f):
    return jax.jit(lambda a: f(a, jnp.asarray(VALUES)))(AMAXES)


def constant_scalars(f):
    pairs = [(np.float32(a), np.float32(v)) for a, v in zip(AMAXES[:3], VALUES[:3], strict=True)]
    program = jax.jit(lambda: [last(f(jnp.full(2, a), jnp.full(2, v))) for a, v in pairs])
    return stacked(program())


def vmapped(f):
    return jax.jit(jax.vmap(f))(AMAXES, VALUES)


def vmapped_along_one(f):
    one = jax.vmap(f, in_axes=(None, 0))
    return of_each(jax.jit(lambda a, v: last(one(a, jnp.broadcast_to(v, (4,))))))


def scanned(f):
    return jax.jit(lambda *pairs: lax.scan(lambda c, pair: (c, f(*pair)), 0, pairs)[1])(
        AMAXES, VALUES
    )


def scanned_and_broadcast(f):
    def body(carry, pair):
        return carry, last(f(*(jnp.full((3,), each) for each in pair)))

    return jax.jit(lambda *pairs: lax.scan(body, 0, pairs)[1])(AMAXES, VALUES)


def mapped(f):
    return jax.jit(lambda *pairs: lax.map(lambda pair: f(*pair), pairs))(AMAXES, VALUES)


def rematerialized(f):
    """The residuals of a product, which its backward pass computes again."""
    names = list(jax.eval_shape(f, AMAXES, VALUES))

    @jax.checkpoint
    def weighted(x, amaxes, values):
        found = lax.stop_gradient(f(amaxes, values))
        return jnp.sum(x * jnp.stack([found[name].astype(jnp.float32) for name in names]))

    x = jnp.ones((len(names), AMAXES.size))
    return dict(zip(names, jax.jit(jax.grad(weighted))(x, AMAXES, VALUES), strict=True))


def fused_with_what_comes_before(f):
    """Amaxes are those of tensors, values are sums."""

    def program(a, v):
        found = amax(jnp.stack([a, a * 0.5, jnp.zeros_like(a)]), PerTensor()).reshape(())
        total = jnp.sum(jnp.stack([v, jnp.zeros_like(v)]))
        return last(f(jnp.broadcast_to(found, (3,)), jnp.broadcast_to(total, (3,))))

    return of_each(jax.jit(program))


def fused_with_what_comes_after(f):
    def program(a, v):
        found = f(jnp.broadcast_to(a, (3,)), jnp.broadcast_to(v, (3,)))
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), found)
        after = [(v * x, v / x, 1 / x, 1 / (v / x), x / v) for x in wide.values()]
        return last(found), after

    compiled = jax.jit(program)
    return of_each(lambda a, v: compiled(a, v)[0])


CONTEXTS = [
    many, eager, scalars, arrays_of_one, a_broadcast_scalar, a_broadcast_row, constants,
    constant_amaxes, constant_values, constant_scalars, vmapped, vmapped_along_one, scanned,
    scanned_and_broadcast, mapped, rematerialized, fused_with_what_comes_before,
    fused_with_what_comes_after,
]  # fmt: skip


def faults(context, *, without=()):
    """Results that are not exact in a context: for each name amaxes, results, and exact results.

    Args:
      context: one of CONTEXTS.
      without: what is left out, by parts of names.
    """
    found = context(functions)
    assert found.keys() == expected().keys()
    wrong = {}
    for name, want in expected().items():
        mine = flushed(found[name])
        want = flushed(want[: len(mine)])
        differ = ~((mine == want) | (np.isnan(mine) & np.isnan(want)))
        if differ.any() and not any(part in name for part in without):
            wrong[name] = (AMAXES[: len(mine)][differ], mine[differ], want[differ])
    return wrong


def flushed(x):
    """In float64, with 0 for subnormal float32 numbers, which some contexts flush."""
    x = np.asarray(x).astype(np.float64)
    return np.where(np.abs(x) < oracle.TINY, 0, x)
