"""A bitcast reads the same bytes of memory as another type: NumPy's own memory is the oracle."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxfp8.programs._hlo import split_at_commas, tensors_of, tuple_types
from jaxfp8.programs.on_cpu._layouts import read_array_type
from jaxfp8.programs.on_cpu._run import run_on_cpu


def program(source, result):
    body = f"  %x = {source} parameter(0)\n  ROOT %y = {result} bitcast(%x)"
    return f"HloModule m\nENTRY %e {{\n{body}\n}}"


def spelled(dtype, shape, order):
    return f"{dtype}[{','.join(map(str, shape))}]{{{','.join(map(str, reversed(order)))}}}"


def in_memory(array, order):
    return np.ascontiguousarray(array.transpose(order)).tobytes()


def from_memory(data, dtype, shape, order):
    physical = np.frombuffer(data, dtype).reshape([shape[d] for d in order])
    return physical.transpose(np.argsort(order))


def numpy_dtype(dtype):
    return jnp.dtype(tensors_of(f"{dtype}[]")[0].dtype)


@st.composite
def shapes_of_size(draw, size):
    """A shape of that many elements, with ones in it, and an order of its dimensions in memory."""
    shape = []
    while size > 1:
        shape.append(draw(st.sampled_from([n for n in range(2, size + 1) if size % n == 0])))
        size //= shape[-1]
    shape = draw(st.permutations(shape + [1] * draw(st.integers(0, 2))))
    return tuple(shape), tuple(draw(st.permutations(range(len(shape)))))


@given(st.data())
def test_layouts_and_shapes(data):
    size = data.draw(st.sampled_from([1, 2, 6, 24, 30]))
    (shape, order), (new_shape, new_order) = (data.draw(shapes_of_size(size)) for _ in range(2))
    dtype, new_dtype = data.draw(
        st.sampled_from([("f32", "s32"), ("bf16", "f16"), ("f8e4m3fn", "u8"), ("f32", "f32")])
    )
    x = np.random.default_rng(size).normal(size=shape).astype(numpy_dtype(dtype))
    text = program(spelled(dtype, shape, order), spelled(new_dtype, new_shape, new_order))
    (y,) = run_on_cpu(text, jax.device_put(x))
    wanted = from_memory(in_memory(x, order), numpy_dtype(new_dtype), new_shape, new_order)
    assert y.dtype == wanted.dtype
    assert y.shape == wanted.shape
    assert np.asarray(y).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("dtype", "new_dtype"), [("f32", "u8"), ("u8", "f32"), ("bf16", "s32"), ("f32", "f8e5m2")]
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_other_width(dtype, new_dtype, order):
    shape = (8, 4)
    x = np.random.default_rng(0).integers(0, 120, 32 * numpy_dtype(dtype).itemsize).astype(np.uint8)
    x = from_memory(x.tobytes(), numpy_dtype(dtype), shape, order)
    size = math.prod(shape) * numpy_dtype(dtype).itemsize // numpy_dtype(new_dtype).itemsize
    text = program(spelled(dtype, shape, order), spelled(new_dtype, (size // 4, 4), order))
    (y,) = run_on_cpu(text, jax.device_put(x))
    wanted = from_memory(in_memory(x, order), numpy_dtype(new_dtype), (size // 4, 4), order)
    assert np.asarray(y).tobytes() == wanted.tobytes()


def test_booleans_are_bytes():
    x = np.array([True, False, True])
    assert run_on_cpu(program("pred[3]{0}", "u8[3]{0}"), x)[0].tolist() == [1, 0, 1]
    assert run_on_cpu(program("u8[3]{0}", "pred[3]{0}"), x.astype(np.uint8))[0].tolist() == [
        True,
        False,
        True,
    ]


def test_packed_elements_keep_their_type():
    x = jnp.arange(-4, 4, dtype=jnp.int4)
    (y,) = run_on_cpu(program("s4[8]{0:E(4)}", "s4[2,4]{1,0:E(4)}"), x)
    assert y.tolist() == np.arange(-4, 4).reshape(2, 4).tolist()
    with pytest.raises(ValueError, match="no whole bytes"):
        run_on_cpu(program("s4[8]{0:E(4)}", "u8[4]{0}"), x)


def test_sizes_that_differ():
    with pytest.raises(ValueError, match="changes the number of bytes"):
        run_on_cpu(program("f32[4]{0}", "f32[5]{0}"), jnp.zeros(4))


def test_types_are_read():
    array = read_array_type("bf16[8,128]{0,1:S(1)}")
    assert (array.dtype, array.shape, array.order, array.bits) == ("bf16", (8, 128), (1, 0), 16)
    assert tuple_types("(f32[2,3]{1,0}, (s8[4]{0}, token[]))") == [
        "f32[2,3]{1,0}",
        "(s8[4]{0}, token[])",
    ]
    assert split_at_commas('a={1,2}, b="x,\\"y", c') == ["a={1,2}", 'b="x,\\"y"', "c"]
    with pytest.raises(ValueError, match="not an array of known size"):
        read_array_type("f32[<=4]{0}")
    assert read_array_type("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}").tiles == ((8, 128), (2, 1))
