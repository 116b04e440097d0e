"""All features that are compiled for TPUs, by name."""

import tpu_matmuls as matmuls
import tpu_meshes as meshes
import tpu_models as models
import tpu_training as training

SECTIONS = (
    matmuls.recipes, matmuls.operations, matmuls.casts, matmuls.transformations,
    models.linen_rows, models.nnx_rows, models.seen_rows, training.optimizers, meshes.meshes,
)  # fmt: skip


def features() -> matmuls.Rows:
    """All rows. No name is there twice."""
    rows: matmuls.Rows = {}
    for section in SECTIONS:
        made = section()
        if twice := rows.keys() & made.keys():
            raise ValueError(f"two features are called {sorted(twice)}")
        rows |= made
    return rows
