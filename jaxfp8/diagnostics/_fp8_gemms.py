"""Did the matmuls really run in FP8? Reading a compiled program."""

import re
from typing import Any, NamedTuple

import jax

_FP8_TARGET = "__cublas$lt$matmul$f8"
# What XLA makes of a matmul that stays in high precision: a library call, or a dot (by itself, or in the body of a fusion).
_HIGH_PRECISION = re.compile(r'custom_call_target="(?:__cublas\$(?:lt\$matmul|gemm)|__onednn\$matmul|__cudnn\$[^"]*)"| dot\(')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Gemms(NamedTuple):
    """The matmuls of a compiled program, each by its jax operation name."""

    fp8: tuple[str, ...]
    high_precision: tuple[str, ...]


def find_gemms(compiled: Any) -> Gemms:
    """The matmuls of a compiled function, as its program text has them (a loop body counts once).

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile()
      >>> len(find_gemms(compiled).high_precision)
      1
    """
    if not isinstance(compiled, str | jax.stages.Compiled):
        raise TypeError(f"compiled is a {type(compiled).__name__}; pass jax.jit(f).lower(...).compile() or its as_text().")
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    fp8, high = [], []
    for line in (text or "").splitlines():
        found = fp8 if _FP8_TARGET in line else high if " = " in line and _HIGH_PRECISION.search(line) else None
        if found is not None:
            name = _OP_NAME.search(line)
            found.append(name[1] if name else line.strip().split(" = ")[0])
    return Gemms(tuple(fp8), tuple(high))


def assert_fp8_gemms(compiled: Any, expected: int) -> None:
    """Raise unless a compiled function has this many FP8 matmuls.

    Counted in the program text: a matmul in the body of a scan counts once, whatever its length.

    Args:
      compiled: what `jax.jit(f, compiler_options=fp8.compiler_options(recipe, chip)).lower(...).compile()` returns.
      expected: FP8 matmuls; a dense layer that is trained has `recipe.fp8_matmuls` of them.

    Raises:
      AssertionError: with both lists, by jax operation name.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.assert_fp8_gemms(jax.jit(jnp.sin).lower(1.0).compile(), 0)
    """
    gemms = find_gemms(compiled)
    if len(gemms.fp8) == expected:
        return
    ours = [name for name in gemms.high_precision if "jaxfp8." in name]
    lines = [f"expected {expected} FP8 matmuls, found {len(gemms.fp8)}."]
    lines += [f"  in FP8: {name}" for name in gemms.fp8]
    lines += [f"  asked for in FP8, but in high precision: {name}" for name in ours]
    lines += [f"  in high precision: {name}" for name in gemms.high_precision if name not in ours]
    if not gemms.fp8:
        lines.append(
            "None at all: compile with jax.jit(f, compiler_options=fp8.compiler_options(recipe, chip)) for a chip with FP8 "
            "matmuls (compute capability 8.9 or later); CPUs emulate FP8 and have none."
        )
    raise AssertionError("\n".join(lines))
