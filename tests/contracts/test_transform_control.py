"""The matrix is sharp enough.

State as a plain summed cotangent fails each row that sums, and no other.
"""

import jax
import numpy as np
import pytest
from contracts import rows_local, rows_mesh
from contracts.faces import control
from contracts.truth import Truth

RIGHT = [
    rows_local.jitted,
    rows_local.remat,
    rows_local.scan,
    rows_local.experts,
    rows_local.vmap_scan,
]
WRONG = [
    rows_local.tied,
    rows_local.scan_broadcast,
    rows_local.vmap_examples,
    rows_local.vmap_of_grad,
    rows_local.vmap_scan_shared,
    rows_local.accumulation,
    rows_local.cond_reuse,
    *rows_mesh.BOUNDED,
    *(row for row in rows_mesh.MANUAL if row.__name__ == "shard_map_inside_no_vma"),
]


def run(build):
    truth, face = Truth(), control()
    row = build(face, truth.watch(face.apply), face.apply)
    state = face.state(row.lead, warm=False)
    amax = jax.jit(row.step)(row.w, state, *row.batch)[2]
    return np.asarray(amax), truth.amax(row.lead)


@pytest.mark.parametrize("row", RIGHT)
def test_control_is_right_where_nothing_is_summed(row):
    amax, true = run(row)
    np.testing.assert_array_equal(amax, true)


@pytest.mark.parametrize("row", WRONG)
def test_control_is_wrong_where_something_is_summed(row):
    amax, true = run(row)
    assert (amax < true).any() or (amax > np.float32(1.125) * true).any()


@pytest.mark.parametrize(
    "row", [row for row in rows_mesh.MANUAL if row.__name__ == "shard_map_inside_vma"]
)
def test_control_cannot_run_under_types(row):
    with pytest.raises(ValueError, match=r"manual axis types do not match|same type"):
        run(row)
