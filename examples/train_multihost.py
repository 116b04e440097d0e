r"""Train the GPT of train_sharded.py with many processes.

Each process has its own devices. The devices of all processes form one mesh.

    python examples/train_multihost.py  # in each process, under Slurm, Open MPI, on TPU pods, ...

    python examples/train_multihost.py \
        --coordinator localhost:12345 --num-processes 2 --process-id 0 &
    python examples/train_multihost.py \
        --coordinator localhost:12345 --num-processes 2 --process-id 1

Model, train step and mesh are those of train_sharded.py. Every process compiles and runs the same
program, and JAX does the communication. Two things are new. The processes find each other
(`jax.distributed.initialize`). Each process reads only its rows of the batch
(`jax.make_array_from_process_local_data`). The losses are those of train_sharded.py.

SIGTERM ends a process at once, with exit code 143, and Ctrl-C with 130. If only one process gets
it, JAX ends the others with an error. This takes up to 10 s if process 0 got it, else up to 60 s
(tests/examples/test_distributed_examples.py).
"""

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from command_line import Parser, at_least_one, check_file, recipe_of, run_script
from devices import force_cpu_devices
from gpt_text import load_text
from jax.sharding import Mesh, NamedSharding
from train_sharded import BATCH_AXES, CONTEXT, ROLES, add_arguments, check, sample, train

HEARTBEAT_SECONDS = 30  # without a heartbeat, JAX ends the run after this time; its default is 100


def batches(mesh: Mesh, text: np.ndarray, batch: int, steps: int) -> Iterator[jax.Array]:
    """Windows uint8[B, T + 1] for each step. A process reads only the rows of its devices."""
    rng, sharding = np.random.default_rng(0), NamedSharding(mesh, ROLES.spec(BATCH_AXES))
    mine = np.zeros(batch, bool)
    for (rows,) in sharding.addressable_devices_indices_map((batch,)).values():
        mine[rows] = True
    for _ in range(steps):
        local = sample(text, rng, (batch,), mine)  # every process draws the same places
        yield jax.make_array_from_process_local_data(sharding, local, (batch, CONTEXT + 1))


# ------------------------------------------------------------------------------------ start and end
def initialize(given: argparse.Namespace) -> None:
    """Join the other processes. JAX reads missing arguments from the cluster.

    Raises:
      ValueError: for a wrong argument, or if one is missing and JAX finds no cluster.
    """
    if given.coordinator is not None and not given.coordinator.rpartition(":")[2].isdecimal():
        raise ValueError(
            f"--coordinator {given.coordinator}: give HOST:PORT, a free port on the host of "
            "process 0."
        )
    for option, count in {
        "--num-processes": given.num_processes,
        "--cpu-devices": given.cpu_devices,
    }.items():
        if count is not None:
            at_least_one(option, count)
    count = given.num_processes or 1
    if given.process_id is not None and not 0 <= given.process_id < (
        given.num_processes or sys.maxsize
    ):
        last = (
            "the number of processes - 1"
            if given.num_processes is None
            else given.num_processes - 1
        )
        raise ValueError(f"--process-id {given.process_id}: give a number from 0 to {last}.")
    force_cpu_devices(given.cpu_devices or max(1, 8 // count))
    # JAX's preemption service would catch SIGTERM and not end the program.
    jax.config.update("jax_enable_preemption_service", False)
    address = given.coordinator, given.num_processes, given.process_id
    try:
        jax.distributed.initialize(*address, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except ValueError as error:
        cure = "Where JAX knows no cluster, give --coordinator, --num-processes and --process-id."
        raise ValueError(f"{error} {cure}") from None


@contextlib.contextmanager
def fail_alone() -> Iterator[None]:
    """End this process at once if the block fails.

    Without this, JAX's exit handler would wait for the other processes, and they for this one.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) else 1)


def parse(arguments: Sequence[str] | None) -> tuple[Parser, argparse.Namespace]:
    parser = Parser(__file__, __doc__)
    add = parser.add_argument
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="where process 0 listens (default: from the cluster)",
    )
    add("--num-processes", type=int, metavar="N", help="(default: from the cluster)")
    add("--process-id", type=int, metavar="I", help="0 to N - 1 (default: from the cluster)")
    of_process = "CPU devices of this process, without a GPU or TPU (default: its share of 8)"
    add("--cpu-devices", type=int, metavar="N", help=of_process)
    add_arguments(parser)
    return parser, parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    parser, given = parse(arguments)
    try:
        recipe_of(given)  # reports a bad recipe before the processes connect
        initialize(given)
        mesh, recipe = check(given)  # all processes see the same mistakes
        text = load_text(None).train
    except ValueError as error:
        parser.error(str(error))
    with fail_alone():
        if jax.process_index() == 0 and given.json is not None:
            try:
                check_file("--json", given.json)
            except ValueError as error:
                parser.error(str(error))
        first = jax.process_index() == 0  # all processes have the losses, and process 0 prints

        def show(step: int, loss: float) -> None:
            if first:
                print(f"step {step:3d}  loss {loss:.4f}", flush=True)

        if first:
            print(f"{jax.process_count()} processes, {jax.device_count()} devices", flush=True)
        losses, _ = train(mesh, recipe, batches(mesh, text, given.batch, given.steps), show)
        if first and given.json is not None:
            Path(given.json).write_text(
                json.dumps({"mesh": dict(mesh.shape), "losses": losses}, indent=2) + "\n"
            )


if __name__ == "__main__":
    run_script(main)
