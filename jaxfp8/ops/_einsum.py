"""`einsum`, and its equations."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import opt_einsum

from jaxfp8._check import check_type
from jaxfp8._typing import Array, Axes, DotDimensionNumbers, DType
from jaxfp8.matmul._given import check_whole_axis
from jaxfp8.matmul._options import MatmulOptions, check_operands, read_options
from jaxfp8.numerics._formats import sum_dtype
from jaxfp8.ops._dot_general import check_result_dtype, dot_general
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard, place_operand, place_result
from jaxfp8.state._identity import match_state
from jaxfp8.state._state import MatmulState
from jaxfp8.state._value_and_grad import recipe_in_context
from jaxfp8.weights._quantized_weight import QuantizedWeight, handle, is_weight

# The equation of an einsum of two operands, and the matmul that it describes.


class _Equation(NamedTuple):
    """A parsed equation. Each axis has one letter. Letters also replace the axes of '...'."""

    text: str  # as the user wrote it, for messages
    lhs: str
    rhs: str
    output: str
    lhs_kept: str = ""  # the letters that the matmul reads, each once
    rhs_kept: str = ""

    def matmul(self) -> tuple[DotDimensionNumbers, Axes]:
        """Dimension numbers of the matmul of the kept axes, and the permutation to the output."""
        x, w = self.lhs_kept, self.rhs_kept
        batch = [name for name in self.output if name in x and name in w]
        contracted = [name for name in x if name in w and name not in self.output]
        product = "".join(batch) + "".join(
            name for name in x + w if name in self.output and name not in batch
        )
        dimension_numbers = (
            (tuple(map(x.index, contracted)), tuple(map(w.index, contracted))),
            (tuple(map(x.index, batch)), tuple(map(w.index, batch))),
        )
        return dimension_numbers, tuple(map(product.index, self.output))

    def called(self, name: str) -> str:
        """How a message names an index. The user did not write the letters of '...'."""
        return f"index {name!r}" if name in self.text else "an index of '...'"


def parse_equation(text: str, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> _Equation:
    """The equation of two operands of these shapes, as `jnp.einsum` reads it."""
    check_type("equation", text, str, "a string, for instance 'bd,dk->bk'")
    shapes = {"lhs": lhs_shape, "rhs": rhs_shape}
    given = f"equation {text!r} of lhs {list(lhs_shape)} and rhs {list(rhs_shape)}"
    if text.count(",") != 1:
        raise ValueError(
            f"{given} has {text.count(',') + 1} operands, but fp8.einsum takes two; split it into "
            "einsums of two operands."
        )
    for (name, shape), written in zip(shapes.items(), text.split("->")[0].split(","), strict=True):
        written = written.replace(" ", "")
        if "." not in written and len(written) != len(shape):
            raise ValueError(
                f"{given}: {written!r} names {len(written)} axes, but {name} has {len(shape)}; "
                "write one index for each axis, or '...' for several."
            )
    try:
        inputs, output, _ = opt_einsum.parser.parse_einsum_input(
            (text, lhs_shape, rhs_shape), shapes=True
        )
    except ValueError as error:
        raise ValueError(f"{given}: {error} Write for instance 'bd,dk->bk'.") from None
    lhs, rhs = inputs.split(",")
    found = _Equation(text, lhs, rhs, output)
    sizes: dict[str, dict[str, int]] = {name: {} for name in shapes}
    for name, letters in (("lhs", lhs), ("rhs", rhs)):
        for letter, size in zip(letters, shapes[name], strict=True):
            if sizes[name].setdefault(letter, size) != size:
                raise ValueError(
                    f"{given}: {found.called(letter)} of {name} has the sizes "
                    f"{sizes[name][letter]} and {size}; axes with the same index must have the "
                    "same size. Use another index."
                )
    for letter in [each for each in sizes["lhs"] if each in sizes["rhs"]]:
        pair = sizes["lhs"][letter], sizes["rhs"][letter]
        if pair[0] != pair[1] and 1 not in pair:
            raise ValueError(
                f"{given}: {found.called(letter)} has size {pair[0]} in lhs and {pair[1]} in rhs; "
                "axes with the same index must have the same size. Use another index."
            )
        if pair[0] != pair[1]:
            # jnp.einsum broadcasts an axis of size 1 against the same index of another size. The
            # operand counts as if it did not have the axis.
            del sizes["lhs" if pair[0] == 1 else "rhs"][letter]
    # If neither the other operand nor the output has a letter, its axis is summed before.
    lhs_kept, rhs_kept = (
        "".join(letter for letter in mine if letter in other or letter in output)
        for mine, other in (sizes.values(), reversed(sizes.values()))
    )
    return found._replace(lhs_kept=lhs_kept, rhs_kept=rhs_kept)


# `einsum` of two operands, computed by `dot_general`.


def einsum(
    equation: str,
    lhs: Array | tuple[Array, ...],
    rhs: Array | QuantizedWeight,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    **options: Unpack[MatmulOptions],
) -> Array:
    """`jnp.einsum(equation, lhs, rhs)` in FP8.

    lhs is the activation and rhs the weight, whatever their order in the equation.

    Args:
      equation: an equation of two operands, with or without `->`, as in `jnp.einsum`. If an index
        occurs in one operand only and not in the output, it is summed in float32 before the cast.
        An index that occurs twice in one operand takes its diagonal. Both axes must then have one
        size.
      lhs: activations. With `prologue=`, the tuple of its arrays. Each index of lhs must then occur
        once in lhs, and also in rhs or in the output.
      rhs: weights.
      recipe: the quantizer of each operand, for instance `fp8.recipes.current()`.
      state: the quantizer state of this matmul, for recipes with state (`fp8.init_state`).
      precision: see `dot_general`.
      preferred_element_type: dtype of the result. The default is that of `jnp.einsum`, which
        promotes: bfloat16 times float16 is float32.
      **options: those of `dot_general`: `out_sharding` (of the result), `reduce_axes`, `x_shard`,
        `w_shard`, `y_shard` (of the result), `kernels`, `state_channel`, `key`, `prologue`, `name`.

    Returns:
      An array with the axes that the output of the equation names.

    Raises:
      TypeError: if the equation is not a string.
      ValueError: if the equation does not fit the operands. The message names its indices.
      TypeError, ValueError, FP8StateError: see `dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, w = jnp.ones((2, 4)), jnp.ones((4, 3, 5))
      >>> fp8.einsum("bd,dhk->bhk", x, w, recipe=fp8.recipes.current()).shape
      (2, 3, 5)
      >>> gate, up, swiglu = x, x, fp8.prologues.SwiGLU()
      >>> fp8.einsum(
      ...     "bd,dhk->bhk", (gate, up), w, recipe=fp8.recipes.current(), prologue=swiglu
      ... ).shape
      (2, 3, 5)
    """
    how = read_options("fp8.einsum", MatmulOptions, options)
    recipe, state = recipe_in_context(recipe, state)
    arrays, rhs = check_operands(lhs, rhs, recipe, how.prologue)
    like = arrays[0]  # has the shape and dtype of the left operand, with a prologue too
    w: Any = handle(rhs) if isinstance(rhs, QuantizedWeight) else rhs
    x_place, w_place = place_operand("x", like, how.x_shard), place_operand("w", w, how.w_shard)
    shapes = x_place.whole_shape(like.shape), w_place.whole_shape(rhs.shape)
    if how.prologue is not None:
        check_whole_axis(like, x_place, how)
        _refuse_alone(parse_equation(equation, *shapes), how.prologue)
    if recipe.is_identity:
        match_state(state, recipe)
        check_kernels(how.kernels)
        check_result_dtype(preferred_element_type)
        x = like if how.prologue is None else how.prologue(*arrays)
        y = jnp.einsum(
            equation, x_place.gather(x), w_place.gather(w), precision=precision,
            preferred_element_type=preferred_element_type, out_sharding=how.out_sharding,
        )  # fmt: skip
        return place_result(y.shape, (x, w), how.y_shard).scatter(y)
    if preferred_element_type is None:
        preferred_element_type = jnp.promote_types(like.dtype, w.dtype)
    parsed = parse_equation(equation, *shapes)
    dimension_numbers, order = parsed.matmul()
    options["x_shard"] = _shard_of_kept("x", how.x_shard, parsed)
    options["w_shard"] = _shard_of_kept("w", how.w_shard, parsed)
    options["y_shard"] = _shard_before_transpose(how.y_shard, order)
    options["out_sharding"] = _before_transpose(how.out_sharding, order)
    y = dot_general(
        arrays if how.prologue is not None else _alone(like, parsed.lhs, parsed.lhs_kept, equation),
        _alone(rhs, parsed.rhs, parsed.rhs_kept, equation),
        dimension_numbers, precision, preferred_element_type,
        recipe=recipe, state=state, **options,
    )  # fmt: skip
    return y.transpose(order)


def _alone(x: Any, names: str, kept: str, equation: str) -> Any:
    """x without the axes that the matmul does not read: it takes diagonals and sums."""
    if names == kept:
        return x
    if is_weight(x):
        raise ValueError(
            f"equation {equation!r} sums over axes of rhs, or takes a diagonal of it, before the "
            "matmul. A weight in FP8 cannot be summed; leave it out of quantize_params."
        )
    return jnp.einsum(f"{names}->{kept}", x.astype(sum_dtype(x.dtype))).astype(x.dtype)


def _refuse_alone(parsed: _Equation, prologue: AbstractPrologue) -> None:
    """Raise ValueError if `_alone` would change lhs, which the cast kernel computes."""
    names, kept = parsed.lhs, parsed.lhs_kept
    if names == kept:
        return
    alone = [name for name in dict.fromkeys(names) if name not in kept or names.count(name) > 1]
    raise ValueError(
        f"equation {parsed.text!r} with prologue={prologue!r} sums, or takes the diagonal of, "
        f"{', '.join(map(parsed.called, alone))} of lhs before the matmul. But a prologue is "
        "computed in the cast. Each index of lhs must occur once in it, and also in rhs (with the "
        "same size) or in the output. Write lhs=prologue(*lhs), and leave prologue= out."
    )


def _shard_of_kept(name: str, shard: Shard | None, parsed: _Equation) -> Shard | None:
    """The shard of an operand after `_alone`, which may remove and reorder axes."""
    names, kept = (parsed.lhs, parsed.lhs_kept) if name == "x" else (parsed.rhs, parsed.rhs_kept)
    if shard is None or names == kept:
        return shard
    letter = names[shard.axis % len(names)]
    if letter not in kept or names.count(letter) > 1:
        raise ValueError(
            f"{name}_shard={shard!r}: equation {parsed.text!r} reduces axis {shard.axis} of {name} "
            "before the matmul, so a mesh cannot split it. Reduce it yourself (in shard_map also "
            f"over mesh axis {shard.axis_name!r}), and pass the result."
        )
    return dataclasses.replace(shard, axis=kept.index(letter))


def _shard_before_transpose(shard: Shard | None, order: Axes) -> Shard | None:
    """The shard of an array whose transpose by `order` has this shard."""
    # `dot_general` raises the error for an axis that is out of range, or for what is no Shard.
    if not isinstance(shard, Shard) or not -len(order) <= shard.axis < len(order):
        return shard
    return dataclasses.replace(shard, axis=order[shard.axis])


def _before_transpose(sharding: Any, order: Axes) -> Any:
    """The sharding of an array whose transpose by `order` has this sharding."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else sharding
    if len(spec) > len(order):
        raise ValueError(
            f"out_sharding={sharding} names {len(spec)} axes, but the result has {len(order)}; "
            "drop the surplus."
        )
    padded = tuple(spec) + (None,) * (len(order) - len(spec))
    permuted = jax.P(*(padded[order.index(axis)] for axis in range(len(order))))
    return (
        jax.sharding.NamedSharding(sharding.mesh, permuted)
        if isinstance(sharding, jax.sharding.NamedSharding)
        else permuted
    )
