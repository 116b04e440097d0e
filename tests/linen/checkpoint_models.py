"""Linen models whose dense layers are flax's or ours, for tests of checkpoints."""

import flax.linen as nn

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense

RECIPE = fp8.recipes.delayed(history_length=4)


class Named(nn.Module):
    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.relu(self.dense(16, name="up")(x))
        x = nn.BatchNorm(use_running_average=not train)(x)
        return self.dense(8, name="down")(x)


class Unnamed(nn.Module):
    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        x = nn.relu(self.dense(16)(x))
        return self.dense(8)(x)


class Block(nn.Module):
    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x, _):
        return nn.relu(self.dense(8, name="up")(x)), None


class Stack(nn.Module):
    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            Block, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True}, length=3
        )
        return block(self.dense, name="blocks")(x, None)[0]


class Boxed(nn.Module):
    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        return self.dense(8, kernel_init=init, name="up")(x)


def fp8_dense(*args, **kwargs):
    return FP8Dense(*args, recipe=RECIPE, **kwargs)
