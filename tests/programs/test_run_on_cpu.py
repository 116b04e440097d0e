"""The door: trees of arguments and results, taps, errors. The programs are compiled for the CPU."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8.programs.on_cpu._run import run_on_cpu


def compiled(f, *arguments, **options):
    return jax.jit(f, **options).lower(*arguments).compile()


def test_trees():
    def f(tree, unused, pair):
        return {"sum": tree["a"] + pair[1], "kept": (pair[0], tree["b"])}, None

    arguments = (
        {"a": jnp.ones(3), "b": jnp.int32(7)},
        jnp.zeros((2, 2)),
        (jnp.zeros(()), jnp.arange(3.0)),
    )
    got, wanted = run_on_cpu(compiled(f, *arguments), *arguments), f(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (x.dtype, x.tolist()) == (y.dtype, y.tolist())


def test_numbers_are_weak():
    f = compiled(lambda x, n, flag: jnp.where(flag, x * n, x), jnp.ones(3), 2.5, True)
    assert run_on_cpu(f, np.ones(3, np.float32), 2, True).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys(impl):
    key = jax.random.key(3, impl=impl)
    f = lambda key: (jax.random.split(key), jax.random.bits(key, (4,)))
    (keys, bits), (wanted_keys, wanted_bits) = run_on_cpu(compiled(f, key), key), f(key)
    assert keys.dtype == wanted_keys.dtype
    assert jax.random.key_data(keys).tolist() == jax.random.key_data(wanted_keys).tolist()
    assert bits.tolist() == wanted_bits.tolist()


def test_donated_arguments_stay():
    x = jnp.arange(4.0)
    f = compiled(lambda x: x + 1, x, donate_argnums=0)
    assert run_on_cpu(f, x).tolist() == [1, 2, 3, 4]
    assert x.tolist() == [0, 1, 2, 3]


def test_large_constants():
    table = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    x = jnp.arange(40.0)
    f = compiled(lambda x: x @ jnp.asarray(table), x)
    np.testing.assert_allclose(run_on_cpu(f, x), np.asarray(x) @ table, rtol=1e-4)


MOVED_OUT = """
import jax, jax.numpy as jnp
from jaxfp8.programs.on_cpu._run import run_on_cpu
table, x = jnp.arange(5000.0), jnp.ones(5000)
program = jax.jit(lambda unused, x: x + table).lower(x, x).compile()
assert program._params.const_args
assert run_on_cpu(program, x, x).tolist() == (table + 1).tolist()
"""


def test_constants_that_jit_made_arguments():
    # jax reads the option when it is imported.
    environment = os.environ | {
        "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run([sys.executable, "-c", MOVED_OUT], env=environment, check=True)


def test_a_name_for_each_matmul():
    def f(x):
        with jax.named_scope("first"):
            y = x @ x
        return jax.lax.scan(lambda c, w: (c @ w, None), y, jnp.stack([x] * 3))[0]

    x, seen = jnp.eye(16) * 2, []
    got = run_on_cpu(
        compiled(f, x), x, seen=lambda label, *operands: seen.append((label, *operands))
    )
    np.testing.assert_array_equal(got, np.eye(16) * 32)
    assert sum("first" in label for label, *_ in seen) == 1
    assert sorted(float(lhs[0, 0] * rhs[0, 0]) for _, lhs, rhs, *_ in seen) == [4, 8, 16, 32]


MATMULS = """HloModule m
ENTRY %e {
  %x = bf16[64,64] parameter(0)
  %y = bf16[64,64] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %z = bf16[64,64] dot(%y, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""


def test_what_is_shown_stays_after_the_run():
    x, shown = jnp.full((64, 64), 3, jnp.bfloat16), []
    run_on_cpu(MATMULS, x, seen=lambda *given: shown.extend(given[1:3]))
    assert all(isinstance(array, np.ndarray) for array in shown)
    # The second matmul's operand is the first one's result.
    assert sorted(float(array[0, 0]) for array in shown) == [3, 3, 3, 576]
    assert all(array.dtype == jnp.bfloat16 and np.all(array == array[0, 0]) for array in shown)


def test_an_error_of_the_callers_own():
    class OwnError(Exception):
        pass

    def seen(*given):
        raise OwnError("enough")

    x = jnp.eye(64)
    with pytest.raises(OwnError, match="enough"):
        run_on_cpu(compiled(lambda x: x @ x, x), x, seen=seen)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "are the tree"),
        ((jnp.ones(3), jnp.ones(3)), "are the tree"),
        ((jnp.ones(4),), r"leaf 0 of the arguments is float32\[4\], but .* float32\[3\]"),
        ((jnp.ones(3, jnp.int32),), r"is int32\[3\], but"),
    ],
)
def test_wrong_arguments(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        run_on_cpu(compiled(lambda x: x + 1, jnp.ones(3)), *arguments)


def test_keyword_arguments_are_refused():
    f = jax.jit(lambda x, *, y: x + y).lower(jnp.ones(3), y=jnp.ones(3)).compile()
    with pytest.raises(ValueError, match="by position"):
        run_on_cpu(f, jnp.ones(3), jnp.ones(3))


def test_arrays_that_a_text_does_not_take():
    text = "HloModule m\nENTRY %e {\n  ROOT %x = f32[3] parameter(0)\n}"
    with pytest.raises(
        ValueError, match=r"takes 1 arrays, float32\[3\]; given are 1, float32\[4\]"
    ):
        run_on_cpu(text, jnp.ones(4))
    with pytest.raises(ValueError, match="given are 0"):
        run_on_cpu(text)


def test_neither_a_program_nor_its_text():
    with pytest.raises(TypeError, match="compiled is of type function"):
        run_on_cpu(lambda x: x, jnp.ones(3))
    with pytest.raises(ValueError, match="0 ENTRY computations"):
        run_on_cpu("nothing")


def test_a_mesh_is_refused():
    mesh = jax.make_mesh((8,), ("data",))
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P("data")))
    with pytest.raises(ValueError, match="only programs for one device"):
        run_on_cpu(compiled(lambda x: x + 1, x), x)
