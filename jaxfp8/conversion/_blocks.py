"""The stacks of blocks of a model, found by their numbered names."""

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(.*?)[_./]?(\d+)")


def stacks_of(modules: Iterable[str], layers: Iterable[str]) -> list[list[str]]:
    """The stacks of blocks: lists of paths, from the first block to the last.

    A stack is two or more modules of one parent, whose names differ in a number: `block_0`,
    `block_1`, or `layers/0`, `layers/1`. Each contains layers of its own. Their types may differ. A
    stack inside a block is none.

    Args:
      modules: the path of each module of a model.
      layers: paths of the layers.

    Example:
      >>> stacks_of(["h_0", "h_1"], ["h_0/mlp", "h_1/mlp"])
      [['h_0', 'h_1']]
    """
    parents = {
        "/".join(path.split("/")[:depth])
        for path in layers
        for depth in range(1, path.count("/") + 1)
    }
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for path in modules:
        parent, _, name = path.rpartition("/")
        if path in parents and (found := _NUMBERED.fullmatch(name)):
            groups.setdefault((parent, found[1]), {})[int(found[2])] = path
    stacks = [[group[i] for i in sorted(group)] for group in groups.values() if len(group) > 1]
    blocks = {block for stack in stacks for block in stack}
    return [stack for stack in stacks if not any(is_inside(stack[0], block) for block in blocks)]


def is_inside(path: str, block: str) -> bool:
    """Whether a path is below that of a block.

    Example:
      >>> is_inside("h_1/mlp", "h_1"), is_inside("h_10/mlp", "h_1")
      (True, False)
    """
    return path.startswith(f"{block}/")


def ends_of(stacks: list[list[str]], first: int, last: int) -> frozenset[str]:
    """The blocks that `keep_first=` and `keep_last=` leave in high precision.

    Raises:
      ValueError: if a number is negative, if the model has no stack, or if no block would be left.
    """
    for name, number in (("keep_first", first), ("keep_last", last)):
        if type(number) is not int or number < 0:
            raise ValueError(f"{name}={number!r} must be a number of blocks, 0 or more.")
    if first == last == 0:
        return frozenset()
    if not stacks:
        raise ValueError(
            f"keep_first={first} and keep_last={last} need blocks, but the model has no numbered "
            "blocks such as block_0 and block_1. The layers of nn.scan share one path and one "
            "recipe. Name layers in rules=[(pattern, None)] instead."
        )
    for stack in stacks:
        if first + last >= len(stack):
            raise ValueError(
                f"keep_first={first} and keep_last={last} leave no block of {stack[0]!r} to "
                f"{stack[-1]!r} in FP8, which are {len(stack)}. Keep fewer."
            )
    return frozenset(
        block for stack in stacks for block in (*stack[:first], *stack[len(stack) - last :])
    )
