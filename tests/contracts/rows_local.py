"""Rows of the transform matrix that need no mesh.

B examples, K = N features, L layers, E experts, M microbatches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxfp8 as fp8

B, K, L, E, M = 8, 4, 2, 2, 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One situation.

    `step` uses the transformation, `reference` plain Python loops on one device.
    """

    step: Callable  # (w, state, *batch) -> loss, gradient of w, new state
    reference: Callable  # (w, state, *batch) -> loss
    w: Any
    batch: tuple = ()
    lead: tuple[int, ...] = ()  # stacked axes of the state
    jit: bool = True
    mesh: Any = None
    specs: tuple = ()  # of w and the batch, on the mesh
    state_spec: Any = None
    truth: Any = None  # where the program cannot tell: amaxes of the batch itself


def integers(seed, shape, largest):
    """Integers, so that a maximum has one value, whatever the order of operations.

    Each matrix has its `largest`.

    19, 23 and 29 lie inside a bin of the ledger. At the upper edge of one a sum of ledgers would be
    exact by luck.
    """
    values = np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(np.float32)
    values[..., -1, -1] = largest
    return values


def data(*lead, seed=0):
    """x [*lead, B, K] and the gradient of y, c [*lead, B, K].

    Each leading index has another maximum; the last example has the largest, so that what one
    device sees is not what all of them see.
    """
    size = np.arange(1, 1 + np.prod(lead), dtype=np.float32).reshape(*lead, 1, 1)
    size = size * np.float32([1] * (B - 1) + [2])[:, None]
    x, c = integers(seed, (*lead, B, K), 29), integers(seed + 1, (*lead, B, K), 19)
    return jax.device_put((x * size, c * size))


def weights(*lead):
    return jax.device_put(integers(7, (*lead, K, K), 23))


def leaky(y):
    return jnp.where(y > 0, y, 0.5 * y)


def at(state, index):
    return jax.tree.map(lambda leaf: leaf[index], state)


def single(layer, plain, transform=lambda loss: loss):
    """One matmul, `transform` applied to the loss."""
    make = lambda layer: lambda w, s, x, c: jnp.sum(layer(w, s, x) * c)
    return transform(make(layer)), make(plain)


def eager(face, layer, plain):
    loss, reference = single(layer, plain)
    return Row(face.value_and_grad(loss), reference, weights(), data(), jit=False)


def jitted(face, layer, plain):
    loss, reference = single(layer, plain)
    return Row(face.value_and_grad(loss), reference, weights(), data())


def chain(layer, around=lambda block: block):
    """L layers in a Python loop; `around` each block."""

    def loss(w, s, x, c):
        for i in range(L):
            x = around(lambda w, s, x, i=i: leaky(layer(w, s, x, i)))(w[i], at(s, i), x)
        return jnp.sum(x * c)

    return loss


def unwatched(plain):
    return lambda w, s, x, at: plain(w, s, x)


def remat(face, layer, plain):
    loss = chain(layer, lambda block: jax.checkpoint(block, policy=fp8.save_fp8_residuals()))
    return Row(face.value_and_grad(loss), chain(unwatched(plain)), weights(L), data(), (L,))


def remat_everything(face, layer, plain):
    loss = chain(layer, jax.checkpoint)
    return Row(face.value_and_grad(loss), chain(unwatched(plain)), weights(L), data(), (L,))


def scanned(layer, around=lambda body: body):
    def loss(w, s, x, c):
        def body(x, per_layer):
            return leaky(layer(*per_layer[:2], x, per_layer[2])), None

        return jnp.sum(lax.scan(around(body), x, (w, s, jnp.arange(L)))[0] * c)

    return loss


def scan(face, layer, plain):
    return Row(
        face.value_and_grad(scanned(layer)), chain(unwatched(plain)), weights(L), data(), (L,)
    )


def remat_in_scan(face, layer, plain):
    around = lambda body: jax.checkpoint(body, policy=fp8.save_fp8_residuals(), prevent_cse=False)
    loss = scanned(layer, around)
    return Row(face.value_and_grad(loss), chain(unwatched(plain)), weights(L), data(), (L,))


def reused(layer, times):
    def loss(w, s, x, c):
        for _ in range(times):
            x = leaky(layer(w, s, x))
        return jnp.sum(x * c)

    return loss


def tied(face, layer, plain):
    return Row(face.value_and_grad(reused(layer, 2)), reused(plain, 2), weights(), data())


def tied_fork(face, layer, plain):
    def loss(w, s, x, c):
        first, second = face.fork(s)
        return jnp.sum(leaky(layer(w, second, leaky(layer(w, first, x)))) * c)

    return Row(face.value_and_grad(loss), reused(plain, 2), weights(), data())


def scan_broadcast(face, layer, plain):
    def loss(w, s, x, c):
        return jnp.sum(
            lax.scan(lambda x, _: (leaky(layer(w, s, x)), None), x, None, length=3)[0] * c
        )

    return Row(face.value_and_grad(loss), reused(plain, 3), weights(), data())


def scan_broadcast_fork(face, layer, plain):
    def loss(w, s, x, c):
        def body(carry, _):
            x, s = carry
            s, here = face.fork(s)
            return (leaky(layer(w, here, x)), s), None

        return jnp.sum(lax.scan(body, (x, s), None, length=3)[0][0] * c)

    return Row(face.value_and_grad(loss), reused(plain, 3), weights(), data())


def per_example(loss):
    """The sum over examples, each one a call of its own: what vmap means."""
    return lambda w, s, x, c: sum(loss(w, s, x[i : i + 1], c[i : i + 1]) for i in range(B))


def examples_reference(plain, recipe_has_state):
    whole = single(plain, plain)[1]
    # State sees the batch as one tensor; without state each example has a scale of its own.
    return whole if recipe_has_state else per_example(whole)


def vmap_examples(face, layer, plain):
    loss, _ = single(layer, plain)
    over = lambda w, s, x, c: jnp.sum(
        jax.vmap(loss, in_axes=(None, None, 0, 0))(w, s, x[:, None], c[:, None])
    )
    reference = examples_reference(plain, bool(jax.tree.leaves(face.init())))
    return Row(face.value_and_grad(over), reference, weights(), data())


def vmap_of_grad(face, layer, plain):
    loss, _ = single(layer, plain)
    run = jax.vmap(face.value_and_grad(loss), in_axes=(None, None, 0, 0))

    def step(w, s, x, c):
        values, grads, states = run(w, s, x[:, None], c[:, None])
        return (
            jnp.sum(values),
            jnp.sum(grads, 0),
            jax.tree.map(lambda leaf: jnp.mean(leaf, 0), states),
        )

    return Row(
        step, examples_reference(plain, bool(jax.tree.leaves(face.init()))), weights(), data()
    )


def in_turn(plain, *, lead):
    """A loss over stacked states, one after the other."""

    def loss(w, s, x, c):
        return sum(jnp.sum(plain(w[i], at(s, i), x[i]) * c[i]) for i in range(lead))

    return loss


def experts(face, layer, plain):
    def loss(w, s, x, c):
        y = jax.vmap(layer)(w, s, x, jnp.arange(E))
        return jnp.sum(y * c)

    return Row(face.value_and_grad(loss), in_turn(plain, lead=E), weights(E), data(E), (E,))


def experts_shared_weight(face, layer, plain):
    def loss(w, s, x, c):
        return jnp.sum(jax.vmap(layer, in_axes=(None, 0, 0, 0))(w, s, x, jnp.arange(E)) * c)

    def reference(w, s, x, c):
        return in_turn(plain, lead=E)(jnp.stack([w] * E), s, x, c)

    return Row(face.value_and_grad(loss), reference, weights(), data(E), (E,))


def examples_of_experts(face, layer, plain):
    """vmap over examples (states shared) of vmap over experts (states stacked)."""

    def loss(w, s, x, c):
        one = lambda x: jax.vmap(layer)(w, s, x, jnp.arange(E))
        return jnp.sum(jax.vmap(one, in_axes=1, out_axes=1)(x[:, :, None]) * c[:, :, None])

    def reference(w, s, x, c):
        if jax.tree.leaves(s):
            return in_turn(plain, lead=E)(w, s, x, c)
        return sum(in_turn(plain, lead=E)(w, s, x[:, b : b + 1], c[:, b : b + 1]) for b in range(B))

    return Row(face.value_and_grad(loss), reference, weights(E), data(E), (E,))


def vmap_scan(face, layer, plain):
    def loss(w, s, x, c):
        def one(w, s, x, c, e):
            body = lambda x, a: (leaky(layer(a[0], a[1], x, e * L + a[2])), None)
            return jnp.sum(lax.scan(body, x, (w, s, jnp.arange(L)))[0] * c)

        return jnp.sum(jax.vmap(one)(w, s, x, c, jnp.arange(E)))

    def reference(w, s, x, c):
        return sum(chain(unwatched(plain))(w[e], at(s, e), x[e], c[e]) for e in range(E))

    return Row(face.value_and_grad(loss), reference, weights(E, L), data(E), (E, L))


def vmap_scan_shared(face, layer, plain):
    """State [E]: shared by the iterations of the inner scan."""

    def loss(w, s, x, c):
        def one(w, s, x, c, e):
            return jnp.sum(
                lax.scan(lambda x, _: (leaky(layer(w, s, x, e)), None), x, None, length=2)[0] * c
            )

        return jnp.sum(jax.vmap(one)(w, s, x, c, jnp.arange(E)))

    def reference(w, s, x, c):
        return sum(reused(plain, 2)(w[e], at(s, e), x[e], c[e]) for e in range(E))

    return Row(face.value_and_grad(loss), reference, weights(E), data(E), (E,))


def circular_pipeline(face, layer, plain):
    """A scan over ticks of a vmap over stages, which shifts its buffer."""

    def loss(w, s, x, c, *, shift):
        def tick(x, _):
            return leaky(shift(lambda *a: layer(*a), w, s, x)), None

        return jnp.sum(lax.scan(tick, x, None, length=E)[0] * c)

    stages = lambda layer, w, s, x: jnp.roll(jax.vmap(layer)(w, s, x, jnp.arange(E)), 1, axis=0)

    def reference(w, s, x, c):
        buffer = [*x]
        for _ in range(E):
            y = [leaky(plain(w[e], at(s, e), buffer[e])) for e in range(E)]
            buffer = [y[-1], *y[:-1]]
        return sum(jnp.sum(x * c) for x, c in zip(buffer, c, strict=True))

    step = face.value_and_grad(lambda w, s, x, c: loss(w, s, x, c, shift=stages))
    return Row(step, reference, weights(E), data(E), (E,))


def accumulation(face, layer, plain):
    """M microbatches in a scan: the user takes a mean of the gradients; one commit."""
    loss, reference = single(layer, plain)
    run = face.value_and_grad(loss, commit=False)

    def step(w, s, x, c):
        def body(carry, micro):
            value, grads, seen = carry
            v, g, new = run(w, s, *micro)
            return (value + v, grads + g / M, face.merge(seen, new)), None

        start = jnp.zeros(()), jnp.zeros_like(w), face.nothing_seen(s)
        (value, grads, seen), _ = lax.scan(body, start, (x, c))
        return value, M * grads, face.commit(s, seen)

    def in_turn(w, s, x, c):
        return sum(reference(w, s, x[m], c[m]) for m in range(M))

    return Row(step, in_turn, weights(), data(M))


def cond(face, layer, plain):
    """The matmul in a branch that is taken; state 1 belongs to the other branch, which is not."""

    def loss(w, s, x, c, take):
        branch = lambda i: lambda x: layer(w[i], at(s, i), x, i)
        return jnp.sum(lax.cond(take > 0, branch(0), branch(1), x) * c)

    def reference(w, s, x, c, take):
        return jnp.sum(plain(w[0], at(s, 0), x) * c)

    return Row(face.value_and_grad(loss), reference, weights(2), (*data(), jnp.float32(1)), (2,))


def cond_reuse(face, layer, plain):
    """One state used in a branch and outside."""

    def loss(w, s, x, c, take):
        y = lax.cond(take > 0, lambda x: leaky(layer(w, s, x)), lambda x: x, x)
        return jnp.sum(leaky(layer(w, s, y)) * c)

    def reference(w, s, x, c, take):
        return reused(plain, 2)(w, s, x, c)

    return Row(face.value_and_grad(loss), reference, weights(), (*data(), jnp.float32(1)))


def cond_vmapped(face, layer, plain):
    """A predicate for each example.

    Both branches run, the rows that were not taken (at=1, larger) must not count.
    """

    def loss(w, s, x, c, take):
        def one(x, c, take):
            y = lax.cond(
                take > 0, lambda x: layer(w, s, x, jnp.where(take > 0, 0, 1)), lambda x: x, x
            )
            return jnp.sum(y * c)

        return jnp.sum(jax.vmap(one)(x[:, None], c[:, None], take))

    take = np.arange(B, dtype=np.float32) % 2

    def reference(w, s, x, c, _):
        return sum(
            jnp.sum((plain(w, s, x[i : i + 1]) if take[i] else x[i : i + 1]) * c[i : i + 1])
            for i in range(B)
        )

    x, c = data()
    return Row(
        face.value_and_grad(loss),
        reference,
        weights(),
        (jnp.where(take[:, None] > 0, x, 9 * x), c, take),
    )


EXACT = [
    eager,
    jitted,
    remat,
    remat_everything,
    scan,
    remat_in_scan,
    tied_fork,
    scan_broadcast_fork,
    vmap_examples,
    vmap_of_grad,
    experts,
    experts_shared_weight,
    examples_of_experts,
    vmap_scan,
    accumulation,
    cond,
]
BOUNDED = [tied, scan_broadcast, vmap_scan_shared, circular_pipeline, cond_reuse, cond_vmapped]
