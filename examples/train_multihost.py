"""Train the GPT of train_sharded.py with many processes: each has its own devices, all of them together one mesh.

    python examples/train_multihost.py                 # in each process, under Slurm, Open MPI, on TPU pods, ...

    python examples/train_multihost.py --coordinator localhost:12345 --num-processes 2 --process-id 0 &
    python examples/train_multihost.py --coordinator localhost:12345 --num-processes 2 --process-id 1

Model, train step and mesh are those of one process: every process compiles and runs the same program, and JAX sends what
has to be sent. Two things are new: the processes find each other (`jax.distributed.initialize`), and each of them reads
only its rows of the batch (`jax.make_array_from_process_local_data`). The losses are those of train_sharded.py.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from train_gpt import load_text
from train_sharded import BATCH_AXES, CONTEXT, ROLES, add_arguments, check, force_cpu_devices, sample, train


def batches(mesh: Mesh, text: np.ndarray, batch: int, steps: int) -> Iterator[jax.Array]:
    """Windows uint8[B, T + 1] for each step; a process reads those rows that its devices need."""
    rng, sharding = np.random.default_rng(0), NamedSharding(mesh, ROLES.spec(BATCH_AXES))
    mine = np.zeros(batch, bool)
    for (rows,) in sharding.addressable_devices_indices_map((batch,)).values():
        mine[rows] = True
    for _ in range(steps):
        local = sample(text, rng, (batch,), mine)  # every process draws the same places
        yield jax.make_array_from_process_local_data(sharding, local, (batch, CONTEXT + 1))


def initialize(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Join the other processes. What is not given, JAX asks of the cluster."""
    if given.coordinator and ":" not in given.coordinator:
        parser.error(f"--coordinator {given.coordinator}: give HOST:PORT, a free port on the host of process 0.")
    force_cpu_devices(given.cpu_devices or 8 // (given.num_processes or 1))
    try:
        jax.distributed.initialize(given.coordinator, given.num_processes, given.process_id)
    except ValueError as error:
        parser.error(f"{error} Where JAX knows no cluster, give --coordinator, --num-processes and --process-id.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens (default: what the cluster says)")
    add("--num-processes", type=int, metavar="N", help="(default: what the cluster says)")
    add("--process-id", type=int, metavar="I", help="0 to N - 1 (default: what the cluster says)")
    add(
        "--cpu-devices",
        type=int,
        metavar="N",
        help="of this process where there is no GPU or TPU (default: its part of 8)",
    )
    add_arguments(parser)
    given = parser.parse_args(arguments)
    initialize(parser, given)
    mesh, recipe = check(parser, given)
    losses, _ = train(mesh, recipe, batches(mesh, load_text(None).train, given.batch, given.steps))
    if jax.process_index() == 0:  # all of them know the losses; one tells
        print(f"{jax.process_count()} processes, {jax.device_count()} devices")
        for step, loss in enumerate(losses):
            print(f"step {step:3d}  loss {loss:.4f}")
        if given.json:
            Path(given.json).write_text(json.dumps({"mesh": dict(mesh.shape), "losses": losses}, indent=2) + "\n")


if __name__ == "__main__":
    main()
