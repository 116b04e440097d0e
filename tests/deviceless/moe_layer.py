"""A layer of experts split over H200s, compiled, and what its program sends, casts and keeps."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from program import SHAPE, Program
from targets import check_one_chip, state_of, topology

import jaxfp8 as fp8
from jaxfp8.programs import Transfer, wire_report

TOPOLOGIES = {8: "1x1x8", 64: "1x8x8"}
KERNELS, BY_XLA = fp8.Kernels("h200"), fp8.Kernels("h200", casts="xla", matmuls="xla")
ROLES = (
    "dispatch", "combine", "gradient of combine", "gradient of dispatch", "gates",
    "gradient of gates", "counts",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer of experts.

    Attributes:
      expert: devices that split the experts.
      data: groups of such devices, each with all experts.
      tokens: of each device.
      features: of a token.
      hidden: features of an expert.
      experts: of all devices of a group.
      choices: of a token.
      capacity_factor: see `fp8.moe.route`.
    """

    expert: int = 8
    data: int = 1
    tokens: int = 4096
    features: int = 7168
    hidden: int = 2048
    experts: int = 64
    choices: int = 8
    capacity_factor: float = 1.25

    @property
    def weights(self) -> set[int]:
        """The numbers of elements of w_in and w_out on one device."""
        one = self.experts // self.expert * self.features * self.hidden
        return {one, 2 * one}


@functools.cache
def compiled(
    recipe: fp8.Recipe,
    layer: Layer,
    *,
    kernels: fp8.Kernels = KERNELS,
    backward: bool = True,
    sent_in_fp8: bool = True,
    gradient_sent_in_fp8: bool = False,
) -> jax.stages.Compiled:
    """The layer, forward alone or with its backward pass. States are settled.

    The gradient of the result depends on the result, as in a network. So no part of the backward
    pass can run before the forward pass ends.
    """
    devices = np.array(topology("h200", TOPOLOGIES[layer.expert * layer.data]).devices)
    mesh = Mesh(devices.reshape(layer.data, layer.expert), ("data", "expert"), (AxisType.Auto,) * 2)
    rows, matrices = P(("data", "expert")), P("expert")
    parallel = fp8.moe.ExpertParallel(
        axis="expert", tokens=("data", "expert"), capacity_factor=layer.capacity_factor,
        sent_in_fp8=sent_in_fp8, gradient_sent_in_fp8=gradient_sent_in_fp8,
    )  # fmt: skip

    def forward(params: Any, states: Any, chosen: Any) -> Any:
        x, gates, w_in, w_out = params
        return fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=recipe, states=states, parallel=parallel,
            kernels=kernels,
        ).y  # fmt: skip

    def step(params: Any, states: Any, chosen: Any, target: Any) -> Any:
        def loss(params: Any, states: Any) -> Any:
            error = forward(params, states, chosen) - target
            return jnp.sum(error.astype(jnp.float32) ** 2)

        return fp8.value_and_grad(loss)(params, states)

    def array(spec: Any, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    total, e, k, f = devices.size * layer.tokens, layer.experts, layer.features, layer.hidden
    x = array(rows, total, k)
    params = (
        x, array(rows, total, layer.choices, dtype=jnp.float32),
        array(matrices, e, k, 2 * f), array(matrices, e, f, k),
    )  # fmt: skip
    states = jax.tree.map(
        lambda leaf: array(P(), *leaf.shape, dtype=leaf.dtype), (state_of(recipe),) * 2
    )
    chosen = array(rows, total, layer.choices, dtype=jnp.int32)
    # bf16 multiplies by cuBLASLt, too.
    options = kernels.compiler_options(fp8.recipes.current() if recipe.is_identity else recipe)
    with jax.set_mesh(mesh):
        lowered = (
            jax.jit(step).lower(params, states, chosen, x)
            if backward
            else jax.jit(forward).lower(params, states, chosen)
        )
        check_one_chip("h200", lowered)
        return lowered.compile(compiler_options=options)


def exchanges(step: jax.stages.Compiled) -> dict[str, list[Transfer]]:
    """The all-to-alls of a program by their role, one of `ROLES`.

    Each pass has one exchange of tokens to experts, and one back that depends on it. So the last
    one of a pass goes back. XLA prints instructions in the order in which they run.
    """
    found: dict[str, list[Transfer]] = {role: [] for role in ROLES}
    passes: dict[bool, list[Transfer]] = {False: [], True: []}
    for transfer in wire_report(step).only(kind="all-to-all").transfers:
        is_backward = "transpose(" in transfer.label
        in_matmul = re.search(r"jit\((_fprop|_gradients)\)", transfer.label)
        if transfer.dtype == "int32":
            found["counts"].append(transfer)
        elif len(transfer.shape) == 1 and not in_matmul:
            found["gradient of gates" if is_backward else "gates"].append(transfer)
        else:
            passes[is_backward].append(transfer)
    for is_backward, transfers in passes.items():
        there, back = ROLES[2:4] if is_backward else ROLES[:2]
        found[there], found[back] = transfers[:-1], transfers[-1:]
    return found


def sent(transfers: list[Transfer]) -> int:
    """Bytes that one device sends to others."""
    return round(sum(transfer.wire_bytes for transfer in transfers))


class Cast(NamedTuple):
    """A kernel that makes FP8 copies of an activation.

    Attributes:
      copies: the shape of each copy.
      is_backward: whether it runs in the backward pass.
    """

    copies: tuple[tuple[int, ...], ...]
    is_backward: bool


def casts(step: jax.stages.Compiled, layer: Layer) -> list[Cast]:
    """The casts of activations. Arrays with as many elements as a weight are weights.

    A kernel in Pallas counts if it reads no FP8 values and writes some. XLA casts with integers, in
    the function `saturating_cast`: its conversions to bytes count, those of one kernel as one cast.
    """
    assert layer.tokens * layer.features not in layer.weights, "x looks like a weight"
    program = Program(step.as_text())
    return [
        Cast(activations, is_backward)
        for shapes, is_backward in _casts(program)
        if (activations := tuple(s for s in shapes if math.prod(s) not in layer.weights))
    ]


def _casts(program: Program) -> Iterator[tuple[list[tuple[int, ...]], bool]]:
    for name, instruction, times in program.runs(program.entry):
        if instruction.op == "custom-call" and "mosaic_gpu" in instruction.attributes:
            operands = [program.computations[name][each].type for each in instruction.operands]
            shapes = [] if any(map(_fp8, operands)) else _fp8(instruction.type)
            operations = [instruction]
        else:
            operations = [
                each
                for each in (
                    program.inside(name, instruction)
                    if instruction.op == "fusion"
                    else [instruction]
                )
                if each.op == "convert"
                and each.type.startswith(("u8", "f8e4m3", "f8e5m2"))
                and "saturating_cast" in each.attributes
            ]
            shapes = [_shape(sizes) for e in operations for _, sizes in SHAPE.findall(e.type)[:1]]
        if shapes:
            for _ in range(times):
                yield shapes, any("transpose(" in each.attributes for each in operations)


def _fp8(type: str) -> list[tuple[int, ...]]:
    return [
        _shape(sizes) for dtype, sizes in SHAPE.findall(type) if dtype in ("f8e4m3fn", "f8e5m2")
    ]


def _shape(sizes: str) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes.split(",") if size)
