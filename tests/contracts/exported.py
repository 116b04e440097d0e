"""Reads programs from files, in a process that knows jaxfp8 and the files alone.

`python exported.py FOLDER NAME...` runs each program of FOLDER with the arrays of its file.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import optax

import jaxfp8 as fp8


def name_optax_states() -> None:
    """What users write to have states of optax in programs."""
    for kind in (optax.ScaleByAdamState, optax.EmptyState):
        name = f"optax.{kind.__name__}"
        jax.export.register_namedtuple_serialization(kind, serialized_name=name)


def as_bytes(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree as bytes, because NumPy's files know no FP8."""
    arrays = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(tree)]
    return {str(i): np.frombuffer(array.tobytes(), np.uint8) for i, array in enumerate(arrays)}


def write(folder: Path, name: str, program: Any, *args: Any, **options: Any) -> None:
    exported = jax.export.export(program, **options)(*args)
    (folder / f"{name}.jax").write_bytes(exported.serialize())
    np.savez(folder / f"{name}.npz", **as_bytes(args))


def main(folder: Path, *names: str) -> None:
    assert fp8.__version__
    name_optax_states()
    for name in names:
        exported = jax.export.deserialize(bytearray((folder / f"{name}.jax").read_bytes()))
        saved = np.load(folder / f"{name}.npz")
        leaves = [
            saved[str(i)].view(aval.dtype).reshape(aval.shape)
            for i, aval in enumerate(exported.in_avals)
        ]
        args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
        result = exported.call(*args, **kwargs)
        assert jax.tree.structure(result) == exported.out_tree
        np.savez(folder / f"{name}_result.npz", **as_bytes(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
