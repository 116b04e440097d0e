"""Calls of NVIDIA's libraries: what is written in their place, against NumPy."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8.programs._hlo import tensors_of
from jaxfp8.programs.on_cpu._run import run_on_cpu

GEMM, LT, F8 = "__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"


def values(*shape, dtype="f32", seed=0):
    x = np.random.default_rng(seed).normal(size=shape)
    return jax.device_put(x.astype(jnp.dtype(tensors_of(f"{dtype}[]")[0].dtype)))


def wide(x):
    return np.asarray(x).astype(np.float64)


def type_of(x):
    short = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}
    name = x.dtype.name.replace("float8_", "f8")
    kind = name.rstrip("0123456789")
    if not name.startswith("f8"):
        name = short[kind] + name[len(kind) :]
    return f"{name}[{','.join(map(str, x.shape))}]"


def call(target, operands, results, dims=((1,), (0,), (), ()), **config):
    """Runs a program of one call; its results without the workspace."""
    sides = "lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch"
    config["dot_dimension_numbers"] = {
        f"{s}_dimensions": list(map(str, d)) for s, d in zip(sides, dims, strict=True)
    }
    config = json.dumps(
        {"gemm_backend_config": {"alpha_real": 1, "alpha_imag": 0, "beta": 0, **config}}
    )
    names = ", ".join(f"%p{n}" for n in range(len(operands)))
    gotten = [
        f"  %r{n} = {type} get-tuple-element(%c), index={n}" for n, type in enumerate(results)
    ]
    text = "\n".join(
        [
            "HloModule m, is_scheduled=true",
            "ENTRY %e {",
            *(f"  %p{n} = {type_of(x)} parameter({n})" for n, x in enumerate(operands)),
            f"  %c = ({', '.join(results)}, s8[4194304]{{0}}) custom-call({names}), "
            f'custom_call_target="{target}", metadata={{op_name="jaxfp8.fprop"}}, '
            f"backend_config={config}",
            *gotten,
            f"  ROOT %t = ({', '.join(results)}) "
            f"tuple({', '.join(f'%r{n}' for n in range(len(results)))})",
            "}",
        ]
    )
    seen = []
    outputs = run_on_cpu(text, *operands, seen=lambda *shown: seen.append(shown))
    assert len(seen) == 1
    assert seen[0][0] == "jaxfp8.fprop"
    for shown, given in zip(seen[0][1:3], operands, strict=False):
        assert shown.dtype == given.dtype
        assert shown.tobytes() == np.asarray(given).tobytes()
    return outputs, seen[0]


def close(got, wanted, dtype="float32"):
    assert got.dtype == dtype
    tolerance = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    np.testing.assert_allclose(wide(got), wanted, rtol=tolerance, atol=1e-5 * np.abs(wanted).max())


EQUATIONS = {
    "plain": ((6, 8), (8, 5), ((1,), (0,), (), ()), "mk,kn->mn"),
    "transposed": ((8, 6), (5, 8), ((0,), (1,), (), ()), "km,nk->mn"),
    "batch": ((3, 6, 8), (3, 8, 5), ((2,), (1,), (0,), (0,)), "bmk,bkn->bmn"),
    "batch inside": ((6, 3, 8), (3, 5, 8), ((2,), (2,), (1,), (0,)), "mbk,bnk->bmn"),
}
# By default each equation with both calls, and each type with each call.
OPERANDS = {(name, GEMM, "f32") for name in EQUATIONS}
OPERANDS |= {(name, LT, "bf16") for name in ("plain", "batch inside")}
OPERANDS |= {(name, LT, "f16") for name in ("transposed", "batch")}
OPERANDS |= {("plain", LT, "f32"), ("transposed", GEMM, "bf16"), ("batch", GEMM, "f16")}


@pytest.mark.parametrize(
    ("equation", "target", "dtype"),
    [
        pytest.param(*row, marks=() if row in OPERANDS else pytest.mark.slow)
        for row in itertools.product(EQUATIONS, (GEMM, LT), ("f32", "bf16", "f16"))
    ],
)
def test_operands(target, dtype, equation):
    lhs, rhs, dims, equation = EQUATIONS[equation]
    a, b = values(*lhs, dtype=dtype), values(*rhs, dtype=dtype, seed=1)
    wanted = np.einsum(equation, wide(a), wide(b))
    (d,), _ = call(target, [a, b], [f"{dtype}[{','.join(map(str, wanted.shape))}]"], dims)
    close(d, wanted, a.dtype.name)


def test_alpha_beta_and_bias():
    a, b, c, bias = values(6, 8), values(8, 5, seed=1), values(6, 5, seed=2), values(5, seed=3)
    (d,), _ = call(LT, [a, b, c, bias], ["f32[6,5]"], alpha_real=0.5, beta=3, epilogue="BIAS")
    close(d, 0.5 * wide(a) @ wide(b) + 3 * wide(c) + wide(bias))
    (d,), _ = call(GEMM, [a, b, c], ["f32[6,5]"], beta=1)
    close(d, wide(a) @ wide(b) + wide(c))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("epilogue", "function"), [("RELU", lambda x: np.maximum(x, 0)), ("GELU", gelu)]
)
def test_activations(epilogue, function, bias):
    a, b, vector = values(6, 8), values(8, 5, seed=1), values(5, seed=2)
    operands = [a, b, *([vector] if bias else [])]
    (d,), _ = call(LT, operands, ["f32[6,5]"], epilogue="BIAS_" * bias + epilogue)
    close(d, function(wide(a) @ wide(b) + bias * wide(vector)))


def test_gelu_keeps_what_it_was_taken_of():
    a, b = values(6, 8), values(8, 5, seed=1)
    (d, aux), _ = call(LT, [a, b], ["f32[6,5]", "f32[6,5]"], epilogue="GELU_AUX")
    close(aux, wide(a) @ wide(b))
    close(d, gelu(wide(a) @ wide(b)))


SCALES = [jnp.float32(0.3), jnp.float32(0.007)]


@pytest.mark.parametrize("dtypes", [("f8e4m3fn", "f8e4m3fn"), ("f8e5m2", "f8e4m3fn")])
@pytest.mark.parametrize("result", ["bf16", "f32"])
def test_fp8(dtypes, result):
    a, b = values(6, 8, dtype=dtypes[0]), values(5, 8, dtype=dtypes[1], seed=1)
    c, bias = values(6, 5, dtype=result, seed=2), values(5, dtype=result, seed=3)
    product = wide(a) @ wide(b).T * float(SCALES[0]) * float(SCALES[1])
    dims = ((1,), (1,), (), ())
    (d,), seen = call(F8, [a, b, *SCALES], [f"{result}[6,5]"], dims, scale_mode=1)
    close(d, product, c.dtype.name)
    assert [float(scale) for scale in seen[3:]] == [float(scale) for scale in SCALES]
    operands = [a, b, c, *SCALES, bias]
    (d,), _ = call(F8, operands, [f"{result}[6,5]"], dims, beta=2, alpha_real=0.5, epilogue="BIAS")
    close(d, 0.5 * product + 2 * wide(c) + wide(bias), c.dtype.name)


def test_fp8_result_is_scaled_and_saturated_and_its_amax_is_that_before():
    a, b = values(16, 32, dtype="f8e4m3fn"), values(16, 32, dtype="f8e4m3fn", seed=1)
    product = wide(a) @ wide(b).T
    one, scale = jnp.float32(1), jnp.float32(40)
    operands = [a, b, one, one, scale]
    (d, amax), _ = call(
        F8, operands, ["f8e4m3fn[16,16]", "f32[]"], ((1,), (1,), (), ()), damax_output=True
    )
    assert np.abs(product * 40).max() > 448
    wanted = jnp.asarray(np.clip(np.float32(product) * 40, -448, 448)).astype(jnp.float8_e4m3fn)
    assert np.asarray(d).tobytes() == np.asarray(wanted).tobytes()
    assert float(amax) == pytest.approx(np.abs(product).max(), rel=1e-6)


def swizzled(scale):
    """[.., R, T] as cuDNN reads it.

    Padded to 128 x 4, in each such tile row r beside row r + 32.
    """
    *batch, rows, tiles = scale.shape
    pad = [(0, 0)] * len(batch) + [(0, -rows % 128), (0, -tiles % 4)]
    padded = np.pad(scale.view(np.uint8), pad)
    *_, rows, tiles = padded.shape
    lies = np.zeros((*batch, rows // 128, tiles // 4, 32, 4, 4), np.uint8)
    for row in range(rows):
        for tile in range(tiles):
            lies[..., row // 128, tile // 4, row % 32, row % 128 // 32, tile % 4] = padded[
                ..., row, tile
            ]
    return jax.device_put(lies.reshape(padded.shape).view(scale.dtype))


@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [
        pytest.param(batch, *shape, marks=() if bool(batch) == batched else pytest.mark.slow)
        for shape, batched in {
            (128, 128, 128): True,
            (256, 384, 512): False,
            (40, 72, 96): False,
            (300, 200, 288): True,
        }.items()
        for batch in ((), (2,))
    ],
)
def test_block_scaled(batch, m, n, k):
    a, b = values(*batch, m, k, dtype="f8e4m3fn"), values(*batch, n, k, dtype="f8e4m3fn", seed=1)
    exponents = (
        np.random.default_rng(2).integers(120, 134, (*batch, m + n, k // 32)).astype(np.uint8)
    )
    a_scale, b_scale = (part.view(jnp.float8_e8m0fnu) for part in np.split(exponents, [m], axis=-2))
    shape = ",".join(map(str, (*batch, m, n)))
    operands = [a, b, swizzled(a_scale.copy()), swizzled(b_scale.copy())]
    (d,), seen = call("__cudnn$blockScaledDot", operands, [f"f32[{shape}]"])
    spread = [np.repeat(wide(scale), 32, -1) for scale in (a_scale, b_scale)]
    wanted = np.einsum("...mk,...nk->...mn", wide(a) * spread[0], wide(b) * spread[1])
    close(d, wanted)
    assert seen[3].tobytes() == a_scale.tobytes()
    assert seen[4].tobytes() == b_scale.tobytes()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"epilogue": "SILU"}, "epilogue SILU"),
        ({"alpha_imag": 1.0}, "complex alpha"),
        ({"scale_mode": 2}, "scale_mode 2"),
    ],
)
def test_refused(config, complaint):
    a, b = values(16, 16, dtype="f8e4m3fn"), values(16, 16, dtype="f8e4m3fn")
    with pytest.raises(ValueError, match=complaint):
        call(F8, [a, b, *SCALES], ["f32[16,16]"], **config)


def test_operands_that_nothing_explains():
    a, b, c = values(6, 8), values(8, 5), values(6, 5)
    with pytest.raises(ValueError, match="1 operands that are unknown here, p2"):
        call(LT, [a, b, c], ["f32[6,5]"])
