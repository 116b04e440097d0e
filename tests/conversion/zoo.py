"""Models that know nothing of FP8, in linen and nnx, and the same models with our layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION

VOCABULARY, WIDTH = 96, 32
TOKENS = jnp.arange(16).reshape(2, 8) % VOCABULARY
KEY = jax.random.key(0)
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "blockwise": fp8.recipes.blockwise(),
}


class Block(nn.Module):
    """An unnamed layer, a named one, and the four projections of attention.

    `dense` is the class of its layers, `plug` the matmul of attention. Attention takes most of the
    time of a trace, so models that are only repeated go without.
    """

    dense: type = nn.Dense
    plug: object = None
    attention: bool = True

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm()(x)
        if self.attention:
            h = nn.MultiHeadDotProductAttention(
                num_heads=2, qkv_dot_general_cls=self.plug, out_dot_general_cls=self.plug
            )(h, h)
        h = self.dense(64, name="up")(x + h)
        return x + self.dense(WIDTH, use_bias=False, name="down")(nn.gelu(h)), None


JITTED = nn.jit(Block)  # one class for all models, so that they could share compiled functions


def _stack(kind, depth, **fields):
    """How models repeat a block."""
    scanned = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": depth}
    return {
        "loop": lambda: [Block(**fields) for _ in range(depth)],
        "remat": lambda: [nn.remat(Block)(**fields) for _ in range(depth)],
        "remat of dots": lambda: [
            nn.remat(Block, policy=jax.checkpoint_policies.dots_saveable)(**fields)
            for _ in range(depth)
        ],
        "jit": lambda: [JITTED(**fields) for _ in range(depth)],
        "scan": lambda: nn.scan(Block, **scanned)(**fields),
        "scan of remat": lambda: nn.scan(nn.remat(Block), **scanned)(**fields),
        "shared scan": lambda: nn.scan(
            Block, variable_broadcast="params", split_rngs={"params": False}, length=depth
        )(**fields),
        "shared loop": lambda: [Block(**fields)] * depth,
        "vmap": lambda: nn.vmap(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=depth,
            in_axes=(None, None),
        )(**fields),
    }[kind]()  # fmt: skip


KINDS = (
    "loop", "remat", "remat of dots", "jit", "scan", "scan of remat", "shared scan", "shared loop",
    "vmap",
)  # fmt: skip


class LM(nn.Module):
    """A language model in flax's own layers."""

    kind: str = "loop"
    depth: int = 3
    attention: bool = True

    def setup(self):
        self.embedding = nn.Embed(VOCABULARY, WIDTH)
        self.blocks = _stack(self.kind, self.depth, attention=self.attention)
        self.mix = nn.Einsum((WIDTH, 4, 8), "btd,dhk->bthk")
        self.head = nn.Dense(VOCABULARY)

    def encode(self, tokens):
        x = self.embedding(tokens)
        if isinstance(self.blocks, (list, tuple)):
            for block in self.blocks:
                x, _ = block(x)
        else:
            x, _ = self.blocks(x, None)
            x = x.mean(0) if self.kind == "vmap" else x
        return self.mix(x).reshape(x.shape)

    def __call__(self, tokens):
        return self.head(self.encode(tokens))


def small(kind="loop"):
    """An `LM` for tests that compile it: two blocks, or a stack that is longer than the batch."""
    return LM(kind, 3 if "scan" in kind or kind == "vmap" else 2, attention=False)


class NNXBlock(nnx.Module):
    def __init__(self, rngs, attention=True):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        if attention:
            self.attention = nnx.MultiHeadAttention(
                num_heads=2, in_features=WIDTH, decode=False, rngs=rngs
            )
        else:
            self.attention = None
        self.up = nnx.Linear(WIDTH, 64, rngs=rngs)
        self.down = nnx.Linear(64, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        x = x + (h if self.attention is None else self.attention(h))
        return x + self.down(nnx.gelu(self.up(x)))


class NNXLM(nnx.Module):
    def __init__(self, rngs, *, scan=False, tied=False, depth=3, attention=True):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.scan, self.tied = scan, tied
        if scan:
            make = nnx.vmap(lambda rngs: NNXBlock(rngs, attention), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=depth)(make)(rngs)
        else:
            self.blocks = nnx.List([NNXBlock(rngs, attention) for _ in range(depth)])
        self.mix = nnx.Einsum("btd,dhk->bthk", (WIDTH, 4, 8), rngs=rngs)
        self.head = None if tied else nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        if self.scan:
            step = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = step(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        x = self.mix(x).reshape(x.shape)
        return self.embedding.attend(x) if self.tied else self.head(x)


def converted(model, recipe, **options):
    return fp8.convert(model, recipe, inputs=(TOKENS,), **options)[0]


def loss_of(model):
    def loss(params, state, tokens):
        logits = model.apply({"params": params, COLLECTION: state}, tokens)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    return loss
