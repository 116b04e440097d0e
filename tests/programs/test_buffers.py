"""Which buffers of a program are live when, for texts written by hand and for real programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8.programs._memory import _buffers_of, step_memory

HEAD = "HloModule m, is_scheduled=true{shared}\n\n"
FORWARD = 'metadata={op_name="jit(f)/jvp()/sin"}'
BACKWARD = 'metadata={op_name="jit(f)/transpose(jvp())/mul"}'


def memory(entry, before="", shared=""):
    lines = "\n".join(f"  {line}" for line in entry)
    return _buffers_of(
        f"{HEAD.format(shared=shared)}{before}\nENTRY %main () -> f32[] {{\n{lines}\n}}"
    )


def spans(buffers):
    return sorted((b.bytes, b.born, b.dies) for b in buffers)


def test_a_residual_and_a_copy_of_it():
    """XLA added the copy, which only the backward pass reads. So both are residuals."""
    found = memory(
        [
            "%x = f32[4]{0} parameter(0)",
            f"%y = f32[4]{{0}} sine(%x), {FORWARD}",
            "%c = f16[4]{0} convert(%y)",
            f"%z = f32[4]{{0}} multiply(%c, %x), {BACKWARD}",
            "ROOT %r = f32[8]{0} concatenate(%z, %z)",
        ]
    )
    assert spans(found.buffers) == [(8, 1, 2), (16, 0, 1), (16, 2, 3)]
    y, c, z = sorted(found.buffers, key=lambda b: b.born)
    assert [b.makers for b in (y, c, z)] == [{"forward"}, {"forward"}, {"backward"}]
    assert "backward" in y.readers & c.readers
    assert spans(found.results) == [(32, 3, 4)]
    assert found.phases == ("forward", "forward", "backward", "backward")


def test_results_in_the_memory_of_arguments():
    entry = [
        "%x = f32[4]{0} parameter(0)",
        "%y = f32[4]{0} sine(%x)",
        "%z = f32[4]{0} cosine(%x)",
        "ROOT %r = (f32[4]{0}, f32[4]{0}) tuple(%y, %z)",
    ]
    assert len(memory(entry).results) == 2
    donated = memory(entry, shared=", input_output_alias={ {1}: (0, {}, may-alias) }")
    assert spans(donated.results) == [(16, 0, 2)]
    assert donated.buffers == ()


def test_a_loop_needs_what_it_carries_until_its_end():
    before = """%body (p: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {
  %p = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = f32[4]{0} get-tuple-element(%p), index=1
  %b = f32[4]{0} get-tuple-element(%p), index=2
  %t = f32[4]{0} sine(%a)
  %u = f32[4]{0} add(%t, %b)
  ROOT %r = (s32[], f32[4]{0}, f32[4]{0}) tuple(%i, %u, %b)
}
%more (q: (s32[], f32[4], f32[4])) -> pred[] {
  %q = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %l = pred[] compare(%j, %j), direction=LT
}
"""
    found = memory(
        [
            "%n = s32[] iota(), iota_dimension=0",
            "%a0 = f32[4]{0} iota(), iota_dimension=0",
            "%b0 = f32[4]{0} iota(), iota_dimension=0",
            "%s = (s32[], f32[4]{0}, f32[4]{0}) tuple(%n, %a0, %b0)",
            "%w = (s32[], f32[4]{0}, f32[4]{0}) while(%s), condition=%more, body=%body",
            "%o = f32[4]{0} get-tuple-element(%w), index=1",
            "ROOT %r = f32[] reduce(%o, %n), dimensions={0}, to_apply=%add",
        ],
        before,
    )
    # One buffer for the sum in all rounds, the other one to the end of the loop. `t` in between.
    assert spans(found.buffers) == [(1, 3, 3), (4, 0, 6), (16, 1, 6), (16, 2, 6), (16, 4, 5)]
    assert found.peak == 5


def test_an_asynchronous_copy_holds_its_operand():
    found = memory(
        [
            "%a = f32[4]{0} iota(), iota_dimension=0",
            "%s = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%a)",
            "%t = f32[8]{0} iota(), iota_dimension=0",
            "%d = f32[4]{0} copy-done(%s)",
            "ROOT %r = f32[12]{0} concatenate(%d, %t)",
        ]
    )
    assert spans(found.buffers) == [(4, 1, 3), (16, 0, 3), (16, 1, 3), (32, 2, 3)]


def test_a_kernel_that_writes_over_its_operand():
    found = memory(
        [
            "%a = f32[4]{0} iota(), iota_dimension=0",
            '%k = (f32[4]{0}, f32[2]{0}) custom-call(%a), custom_call_target="k", '
            "output_to_operand_aliasing={{0}: (0, {})}",
            "%e = f32[4]{0} get-tuple-element(%k), index=0",
            "ROOT %r = f32[4]{0} sine(%e)",
        ]
    )
    assert spans(found.buffers) == [(8, 1, 1), (16, 0, 2)]


def test_a_text_without_order():
    with pytest.raises(ValueError, match=mentions("is_scheduled=true", "compile().as_text()")):
        _buffers_of("HloModule m\n\nENTRY %main () -> f32[] {\n}")


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("remat", "recipe"),
    [
        (False, "identity"),
        (False, "delayed"),
        (True, "blockwise"),
        slow(False, "blockwise"),
        slow(True, "identity"),
        slow(True, "delayed"),
    ],
)
def test_live_bytes_fit_into_what_xla_allocates(recipe, remat):
    recipe = fp8.recipes.get(recipe)
    states = [fp8.init_state(recipe)] * 3

    def loss(params, states, x):
        for w, state in zip(params, states, strict=True):
            layer = lambda x, w, state: jax.nn.gelu(fp8.dot(x, w, recipe=recipe, state=state))
            x = (jax.checkpoint(layer) if remat else layer)(x, w, state)
        return jnp.sum(x)

    def step(params, states, x):
        _, grads, _ = fp8.value_and_grad(loss)(params, states, x)
        return [w - g for w, g in zip(params, grads, strict=True)]

    params, x = [jnp.ones((128, 128))] * 3, jnp.ones((256, 128))
    compiled = jax.jit(step, donate_argnums=0).lower(params, states, x).compile()
    found = _buffers_of(compiled.as_text())
    live = sum(b.bytes for b in found.live(found.peak))
    allocated = compiled.memory_analysis().temp_size_in_bytes
    # A copy of a donated weight may stay in its memory.
    assert 0.6 * allocated < live <= allocated + sum(w.nbytes for w in params)
    memory = step_memory(compiled, {128 * 128})
    assert memory.gradients + memory.residuals + memory.temporaries == allocated
