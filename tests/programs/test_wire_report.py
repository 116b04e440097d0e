"""What programs on eight devices put on the wire, counted by hand.

The mesh is 4 x 2, over "fsdp" and "tensor".
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.programs import assert_wire_dtype, wire_report

# x [M, K] float32; over "fsdp" a shard of it is [16, 32], 2048 bytes.
M, K = 64, 32
SHARD = M // 4 * K * 4


def mesh(axis_type=AxisType.Auto):
    return Mesh(
        np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(axis_type,) * 2
    )


ROWS, WHOLE = P("fsdp"), P()


def compiled(f, *arguments, into=ROWS, out=WHOLE):
    """`f`, compiled inside a shard_map over the mesh; arguments are arrays or shapes of float32."""
    arrays = [
        jax.ShapeDtypeStruct(a, jnp.float32) if isinstance(a, tuple) else a for a in arguments
    ]
    mapped = jax.shard_map(f, mesh=mesh(), in_specs=into, out_specs=out, check_vma=False)
    return jax.jit(mapped).lower(*arrays).compile()


def counts(report):
    """{(kind, dtype, group size): (tensors, operand bytes, wire bytes)}."""
    keys = {(t.kind, t.dtype, t.group_size) for t in report.transfers}
    parts = {(k, d, g): report.only(kind=k, dtype=d, group_size=g) for k, d, g in keys}
    return {key: (part.count, part.operand_bytes, part.wire_bytes) for key, part in parts.items()}


def gather(x):
    return lax.all_gather(x, "fsdp", tiled=True)


def scan(f, length):
    return lambda x: lax.scan(lambda carry, _: (f(carry), None), x, None, length=length)[0]


def halved_sum(x):
    return lax.psum(x, "tensor") * 0.5


# The devices of a ring over "fsdp", and of a line.
RING = [(i, (i + 1) % 4) for i in range(4)]

# function of a shard [16, 32], the expected counts. Groups: 4 along "fsdp", 2 along "tensor".
PLAIN = {
    "all-gather": (gather, {("all-gather", "float32", 4): (1, SHARD, 3 * SHARD)}),
    "all-reduce": (
        lambda x: lax.psum(x, "tensor"),
        {("all-reduce", "float32", 2): (1, SHARD, SHARD)},
    ),
    "all-reduce, four": (
        lambda x: lax.pmax(x, "fsdp"),
        {("all-reduce", "float32", 4): (1, SHARD, 1.5 * SHARD)},
    ),
    "all-reduce, everyone": (
        lambda x: lax.psum(x, ("fsdp", "tensor")),
        {("all-reduce", "float32", 8): (1, SHARD, 1.75 * SHARD)},
    ),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "fsdp", tiled=True),
        {("reduce-scatter", "float32", 4): (1, SHARD, 0.75 * SHARD)},
    ),
    # XLA for CPUs cuts the operand in four pieces, which are one tensor.
    "all-to-all": (
        lambda x: lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
        {("all-to-all", "float32", 4): (1, SHARD, 0.75 * SHARD)},
    ),
    "ring": (
        lambda x: lax.ppermute(x, "fsdp", RING),
        {("collective-permute", "float32", 4): (1, SHARD, SHARD)},
    ),
    "line": (
        lambda x: lax.ppermute(x, "fsdp", RING[:2]),
        {("collective-permute", "float32", 3): (1, SHARD, SHARD)},
    ),
    "two kinds": (
        lambda x: lax.psum(gather(x), "tensor"),
        {
            ("all-gather", "float32", 4): (1, SHARD, 3 * SHARD),
            ("all-reduce", "float32", 2): (1, 4 * SHARD, 4 * SHARD),
        },
    ),
    # A scalar and a matrix, summed together: two tensors, in one collective or two.
    "a tuple": (
        lambda x: lax.psum((x, x[0, 0]), "tensor"),
        {("all-reduce", "float32", 2): (2, SHARD + 4, SHARD + 4)},
    ),
    "scan": (scan(halved_sum, 5), {("all-reduce", "float32", 2): (5, 5 * SHARD, 5 * SHARD)}),
    "nested scan": (
        scan(scan(halved_sum, 3), 5),
        {("all-reduce", "float32", 2): (15, 15 * SHARD, 15 * SHARD)},
    ),
    "scan, and once more behind it": (
        lambda x: gather(scan(halved_sum, 5)(x)),
        {
            ("all-reduce", "float32", 2): (5, 5 * SHARD, 5 * SHARD),
            ("all-gather", "float32", 4): (1, SHARD, 3 * SHARD),
        },
    ),
    "cond, the dearest branch": (
        lambda x: lax.cond(
            x[0, 0] > 0, lambda x: lax.psum(x, "fsdp"), lambda x: lax.psum(x, "tensor"), x
        ),
        {("all-reduce", "float32", 4): (1, SHARD, 1.5 * SHARD)},
    ),
    "cond in a scan": (
        scan(lambda x: lax.cond(x[0, 0] > 0, halved_sum, lambda x: x + 1, x), 5),
        {("all-reduce", "float32", 2): (5, 5 * SHARD, 5 * SHARD)},
    ),
    "scan in a cond, dearer than a larger tensor": (
        lambda x: lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "fsdp"), scan(halved_sum, 5), x),
        {("all-reduce", "float32", 2): (5, 5 * SHARD, 5 * SHARD)},
    ),
    "nothing": (lambda x: x + 1, {}),
    "a while loop of unknown length, with nothing": (
        lambda x: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + 1, x),
        {},
    ),
}


@pytest.mark.parametrize("row", PLAIN)
def test_counts(row):
    function, expected = PLAIN[row]
    assert counts(wire_report(compiled(function, (M, K)))) == expected


LAYERS = 6


@pytest.mark.parametrize(("remat", "gathers"), [(False, LAYERS), (True, 2 * LAYERS)])
def test_remat_gathers_weights_once_more(remat, gathers):
    def layer(h, w):
        return jnp.tanh(h @ gather(w)), None  # w [8, 32], 1024 bytes of a weight [32, 32]

    def loss(w, h):
        return lax.scan(jax.checkpoint(layer) if remat else layer, h, w)[0].sum()

    program = compiled(
        jax.grad(loss),
        (LAYERS, K, K),
        (M, K),
        into=(P(None, "fsdp"), P("fsdp")),
        out=P(None, "fsdp"),
    )
    # Residuals of the layers without remat are the gathered weights. Gradients [32, 32] are
    # scattered once each.
    assert counts(wire_report(program)) == {
        ("all-gather", "float32", 4): (gathers, gathers * 1024, 3 * gathers * 1024),
        ("reduce-scatter", "float32", 4): (LAYERS, LAYERS * 4096, 0.75 * LAYERS * 4096),
    }


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_what_the_compiler_adds(axis_type):
    # w is split over "fsdp" and gathered; contracting over "tensor" leaves one sum.
    m = mesh(axis_type)

    def arg(*spec):
        return jax.ShapeDtypeStruct((M, M), jnp.float32, sharding=NamedSharding(m, P(*spec)))

    def f(x, w):
        if axis_type is AxisType.Explicit:
            return jnp.einsum(
                "mk,kn->mn", x, jax.sharding.reshard(w, P("tensor")), out_sharding=P("fsdp")
            )
        w = lax.with_sharding_constraint(w, NamedSharding(m, P("tensor")))
        return lax.with_sharding_constraint(x @ w, NamedSharding(m, P("fsdp")))

    with jax.set_mesh(m):
        program = jax.jit(f).lower(arg("fsdp", "tensor"), arg("tensor", "fsdp")).compile()
    w_shard, y_shard = 32 * 16 * 4, 16 * 64 * 4
    assert counts(wire_report(program)) == {
        ("all-gather", "float32", 4): (1, w_shard, 3 * w_shard),
        ("all-reduce", "float32", 2): (1, y_shard, y_shard),
    }


def unknown_length(x):
    return lax.while_loop(
        lambda x: lax.pmax(x[0, 0], "fsdp") < 3, lambda x: lax.psum(x, "tensor"), x
    )


def test_a_loop_of_unknown_length_is_an_error():
    program = compiled(unknown_length, (M, K))
    with pytest.raises(
        ValueError, match=r"in a loop whose length the program does not know: .*while.*trip_count="
    ):
        wire_report(program)
    # The condition is asked once more than the body runs.
    assert counts(wire_report(program, trip_count=7)) == {
        ("all-reduce", "float32", 2): (7, 7 * SHARD, 7 * SHARD),
        ("all-reduce", "float32", 4): (8, 8 * 4, 8 * 6),
    }
    assert counts(wire_report(program, trip_count=0)) == {("all-reduce", "float32", 4): (1, 4, 6)}


@pytest.mark.parametrize(
    ("argument", "error", "complaint"),
    [
        (jnp.ones(3), TypeError, "Pass jax.jit"),
        (jax.jit(jnp.sin).lower(1.0), TypeError, "Lowered"),
        (None, TypeError, "NoneType"),
        ("", ValueError, "0 ENTRY"),
        (jax.jit(jnp.sin).lower(1.0).as_text(), ValueError, "0 ENTRY"),
        ("ENTRY %f () -> f32[] {\n}\nENTRY %g () -> f32[] {\n}", ValueError, "2 ENTRY"),
    ],
)
@pytest.mark.parametrize(
    "reader", [wire_report, lambda p: assert_wire_dtype(p, "all-gather", fp8.E4M3)]
)
def test_no_program(reader, argument, error, complaint):
    with pytest.raises(error, match=complaint):
        reader(argument)


def test_wrong_arguments():
    program = compiled(gather, (M, K))
    with pytest.raises(ValueError, match="leave it out"):
        wire_report(program, trip_count=3)
    with pytest.raises(ValueError, match="trip_count is -1; a loop runs"):
        wire_report(program, trip_count=-1)
    with pytest.raises(ValueError, match="kind='allgather' is unknown; use 'all-gather', "):
        wire_report(program).only(kind="allgather")
    with pytest.raises(ValueError, match="kind='allgather'"):
        assert_wire_dtype(program, "allgather", fp8.E4M3)
    with pytest.raises(ValueError, match="dtypes is empty"):
        assert_wire_dtype(program, "all-gather")


def test_text_and_program_are_the_same():
    program = compiled(scan(halved_sum, 5), (M, K))
    assert wire_report(program) == wire_report(program.as_text())
    assert hash(wire_report(program)) == hash(wire_report(program.as_text()))


def test_cpus_widen_what_they_send():
    """As the docstring of `wire_report` says.

    Dtypes are to be read in a program for the chip that is meant.
    """
    x = jax.ShapeDtypeStruct((M, K), jnp.float8_e4m3fn)
    program = compiled(gather, x)
    assert counts(wire_report(program)) == {
        ("all-gather", "float16", 4): (1, SHARD // 2, 3 * SHARD // 2)
    }


def test_assert_wire_dtype_on_a_compiled_program():
    program = compiled(lambda x: (gather(x), lax.pmax(x[0, 0], "fsdp")), (M, K), out=(WHOLE, WHOLE))
    assert_wire_dtype(program, "all-gather", jnp.float32)
    with pytest.raises(
        AssertionError,
        match=r"another dtype than float8_e4m3fn:\n  float32\[16,32\], 2,048 bytes.*gather",
    ):
        assert_wire_dtype(program, "all-gather", fp8.E4M3)
    with pytest.raises(
        AssertionError,
        match=r"(?s)no reduce-scatter carries float32; the program sends\nkind .*all-gather",
    ):
        assert_wire_dtype(program, "reduce-scatter", jnp.float32)
    # The scalar is the only all-reduce.
    with pytest.raises(AssertionError, match="no all-reduce of at least 5 bytes carries float32"):
        assert_wire_dtype(program, "all-reduce", jnp.float32, at_least=5)
    assert_wire_dtype(compiled(unknown_length, (M, K)), "all-reduce", jnp.float32)


def test_what_is_kept_in_high_precision_may_travel():
    """Also in another order of axes, as XLA for GPUs transposes a weight before it sends it."""
    gathers = lambda x: (gather(x.T), gather(x[:, :8].T), gather(x[:8].astype(jnp.uint8)))
    program = compiled(gathers, (M, K), out=(WHOLE,) * 3)
    check = functools.partial(assert_wire_dtype, program, "all-gather", jnp.uint8)
    rows = NamedSharding(mesh(), ROWS)
    head, embed = (jax.ShapeDtypeStruct((M, n), jnp.float32, sharding=rows) for n in (K, 8))
    check(kept={"head": head, "embed": embed})
    with pytest.raises(AssertionError, match=r"(?s)float32\[32,16\], 2,048 .* by kept=\.$"):
        check(kept={"embed": embed})
    with pytest.raises(TypeError, match=r"kept\['head'\] is a ndarray, which has no sharding."):
        check(kept={"head": np.ones((M, K))})
