"""Which matmuls of a compiled program are in FP8.

The program is read from its entry, along its calls. So each matmul counts as often as the program
names it.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxfp8.programs._hlo import BRANCHES, CALLS, Instruction, read_program, tensors_of

# The FP8 matmuls of cuBLASLt (scalar scales) and of cuDNN (block scales, MXFP8, on Blackwell).
_FP8_TARGETS = ("__cublas$lt$matmul$f8", "__cudnn$blockScaledDot")
# A matmul in high precision becomes one of these calls, or a `dot`, alone or in a fusion.
_LIBRARY = ("__cublas$", "__onednn$matmul")
# The scopes of `matmul._call.Call.multiply`. Pallas kernels that multiply are inside of such a
# scope. Pallas kernels that cast are outside.
_ASKED = re.compile(r"jaxfp8\.(fprop|dgrad|wgrad)(?!\.high_precision)")
_PALLAS = "mosaic_gpu"

# TPUs: XLA prints a matmul as a `convolution`. Operations of JAX with this name are convolutions of
# the model.
_CONVOLUTION = "conv_general_dilated"
_TPU_KERNEL = "tpu_custom_call"
# XLA's own kernel for `jax.lax.ragged_dot` has this attribute.
_RAGGED_DOT = "ragged_dot_tiling="
_FP8 = _E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
# Whether a TPU multiplies E4M3, by its `device_kind`. The others convert E4M3 to a wider type
# inside of the matmul. So the program shows E4M3 operands, and the matmul is as slow as in
# bfloat16. All of them multiply E5M2 by E5M2.
_MULTIPLIES_E4M3 = {"TPU7x": True} | dict.fromkeys(
    ("TPU v6 lite", "TPU v6e", "TPU v5", "TPU v5p", "TPU v5 lite", "TPU v5e"), False
)


class _Gemms(NamedTuple):
    """The matmuls of a compiled program, each by its jax operation name."""

    fp8: tuple[str, ...]
    high_precision: tuple[str, ...]


def _find_gemms(compiled: Any) -> _Gemms:
    """The matmuls of one run of a compiled function. A loop body counts once.

    One branch of a conditional counts: the one with the most matmuls. If several have the most, it
    is the one with the fewest in FP8. `fp8.value_and_grad` compiles a step with unset scales and a
    step without, but a run takes only one of them.

    FP8 matmuls are calls of cuBLASLt, calls of cuDNN for block scales, and the Pallas kernels of
    layers and of `fp8.dot`. A `dot` of FP8 operands in a Triton fusion counts as high precision,
    because the program does not say how it multiplies them. On a TPU, the dtypes of the operands
    and the chip decide.
    """
    program = read_program(compiled)
    multiplies = _tpu_multiplies(compiled)

    @functools.cache
    def run_by(name: str) -> tuple[tuple[str, bool], ...]:
        """The matmuls of a computation and of all that it calls, and whether each is in FP8."""
        found: list[tuple[str, bool]] = []
        computation = program.computations.get(name, {})
        for instruction in computation.values():
            if instruction.is_second_half:
                continue
            target = instruction.call_target
            by_kernel = target.startswith(_PALLAS) and _ASKED.search(instruction.label)
            if target in _FP8_TARGETS or by_kernel:
                found.append((instruction.label, True))
            elif instruction.opcode == "dot" or target.startswith(_LIBRARY):
                found.append((instruction.label, False))
            elif _is_tpu_matmul(instruction):
                types = [computation[o].type for o in instruction.operands if o in computation]
                found.append((instruction.label, multiplies(types)))
            for called in instruction.computations(*CALLS, "body", "condition"):
                found += run_by(called)
            branches = [run_by(branch) for branch in instruction.computations(*BRANCHES)]
            most = max(branches, key=lambda of: (len(of), -sum(fp8 for _, fp8 in of)), default=())
            found += most
        return tuple(found)

    found = run_by(program.entry)
    return _Gemms(
        tuple(label for label, fp8 in found if fp8),
        tuple(label for label, fp8 in found if not fp8),
    )


def _is_tpu_matmul(instruction: Instruction) -> bool:
    if instruction.opcode == "convolution":
        return _CONVOLUTION not in instruction.label.rpartition("/")[2]
    # Pallas kernels that multiply are in the scope of a matmul, as on GPUs. Kernels of others count
    # in no list, as on GPUs.
    return instruction.call_target == _TPU_KERNEL and (
        _RAGGED_DOT in instruction.attributes or _ASKED.search(instruction.label) is not None
    )


def _device_kinds(compiled: Any) -> list[str]:
    """What jax calls the devices of a compiled program. Empty for a text."""
    if isinstance(compiled, str):
        return []
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return sorted({device.device_kind for each in shardings for device in each.device_set})


def _tpu_multiplies(compiled: Any) -> Callable[[list[str]], bool]:
    """A function that says whether the TPU of this program multiplies in FP8, by operand types."""
    kinds = _device_kinds(compiled)

    def multiplies(types: list[str]) -> bool:
        # A kernel also reads the sizes of groups, and may read scales.
        dtypes = [tensor.dtype for type in types for tensor in tensors_of(type)]
        if sum(map(dtypes.count, _FP8)) < 2:
            return False
        if not kinds:
            raise ValueError(
                "compiled is a text with matmuls of FP8 operands in the form of TPUs. The text "
                "does not say which TPU, and they differ in what they multiply. Pass "
                "jax.jit(f).lower(...).compile() instead of its text."
            )
        if len(kinds) > 1 or kinds[0] not in _MULTIPLIES_E4M3:
            raise ValueError(
                f"compiled is a program for {' and '.join(kinds)}, whose matmuls read FP8. jaxfp8 "
                "does not know whether this chip multiplies FP8. It knows "
                f"{', '.join(_MULTIPLIES_E4M3)}."
            )
        return _E4M3 not in dtypes or _MULTIPLIES_E4M3[kinds[0]]

    return multiplies


def _advice(kinds: list[str]) -> str:
    """What to do if no matmul is in FP8, on devices of these kinds."""
    if any(_MULTIPLIES_E4M3.get(kind) for kind in kinds):
        return (
            f"None in FP8: a {kinds[0]} multiplies operands with scales of tensors or rows in FP8, "
            "and tiles in bfloat16. Use delayed(), current() or rowwise()."
        )
    if any(kind in _MULTIPLIES_E4M3 for kind in kinds):
        return (
            f"None in FP8: a {kinds[0]} converts E4M3 to a wider type inside of each matmul. No "
            'change of your code helps. Of TPUs only 7x ("tpu7x") multiplies E4M3.'
        )
    return (
        'None in FP8: write kernels = fp8.Kernels("h200"), or another chip with FP8 matmuls '
        '(compute capability 8.9 or later, or "tpu7x"). Compile with jax.jit(f, '
        "compiler_options=kernels.compiler_options(recipe)). CPUs emulate FP8 and have no FP8 "
        "matmuls. Recipes with tiles also need kernels=kernels in each layer."
    )


def assert_fp8_gemms(compiled: Any, expected: int | None = None) -> None:
    """Raise AssertionError if a matmul of a recipe is not in FP8.

    A matmul in the body of a scan counts once, for any length of the scan. Of a `lax.cond`, one
    branch counts: the one with the most matmuls. Matmuls outside of recipes are ignored, for
    instance those of attention.

    Without `expected`, two kinds of matmuls can be missed. XLA turns a matmul with a vector or a
    constant into a sum, so a layer with one output feature is not counted. XLA may also fold an
    operation into a matmul, for instance the transpose of `fp8.dot(x, w.T)`. That matmul can lose
    the name of its recipe. It is then ignored, unless it is in FP8.

    On TPUs, XLA writes matmuls as convolutions. One is in FP8 if both operands are, and if the chip
    multiplies them. TPU 7x multiplies E4M3 and E5M2. TPU v6e, v5p and v5e multiply E5M2 by E5M2
    alone. They convert E4M3 to a wider type inside of the matmul, at the speed of bfloat16. The
    text of a program does not say for which TPU it is, so pass the compiled function. Convolutions
    of the model are ignored.

    Args:
      compiled: what `jax.jit(f, compiler_options=kernels.compiler_options(recipe)).lower(...)
        .compile()` returns, for instance with `kernels = fp8.Kernels("h200")`.
      expected: the number of FP8 matmuls. Only this number is then compared. A dense layer that is
        trained has `recipe.fp8_matmuls` of them. With None, the program must have a matmul of a
        recipe, and all of them must be in FP8.

    Raises:
      AssertionError: with both lists of matmuls, by jax operation name.
      TypeError: if `compiled` is neither a compiled function nor a text.
      ValueError: if the program has no text. Also if matmuls of a TPU read FP8, and `compiled` is a
        text or for a TPU that is not named above.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.programs.assert_fp8_gemms(jax.jit(jnp.sin).lower(1.0).compile(), 0)
      >>> step = jax.jit(lambda x: fp8.dot(x, x, recipe=fp8.recipes.current()))
      >>> compiled = step.lower(jnp.ones((32, 32))).compile()  # for a CPU, which has no FP8 matmul
      >>> try:
      ...     fp8.programs.assert_fp8_gemms(compiled)
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[0])
      expected every matmul of a recipe in FP8, found 0 in FP8 and 1 in high precision.
    """
    gemms = _find_gemms(compiled)
    missed = [name for name in gemms.high_precision if _ASKED.search(name)]
    if len(gemms.fp8) == expected or (expected is None and gemms.fp8 and not missed):
        return
    if expected is None:
        lines = [
            f"expected every matmul of a recipe in FP8, found {len(gemms.fp8)} in FP8 and "
            f"{len(missed)} in high precision."
        ]
    else:
        lines = [f"expected {expected} FP8 matmuls, found {len(gemms.fp8)}."]
    lines += [f"  in FP8: {name}" for name in gemms.fp8]
    lines += [f"  asked for in FP8, but in high precision: {name}" for name in missed]
    lines += [f"  in high precision: {name}" for name in gemms.high_precision if name not in missed]
    if not gemms.fp8 and not missed:
        lines.append(
            "No matmul of a recipe at all: compile a step whose layers have an FP8 recipe."
        )
    elif not gemms.fp8:
        lines.append(_advice(_device_kinds(compiled)))
    raise AssertionError("\n".join(lines))
