"""Execute the notebooks, each from a clean kernel of the Python that runs this script.

    python notebooks/execute.py            # in place: outputs and pictures are kept in the files
    python notebooks/execute.py --check    # executes copies and changes no file; CI runs it

Any error fails.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parent
CELL_SECONDS = 300  # a cell that takes longer hangs


def execute(path: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs.

    Raises CellExecutionError, which shows the cell, if one fails.
    """
    notebook = nbformat.read(path, as_version=4)
    # No kernel directories: what is left is the kernel of this interpreter, whatever others are
    # installed for the user.
    kernel = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )
    with tempfile.TemporaryDirectory() as folder:  # what a notebook writes is not kept
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(cleanup_kc=True)  # end the kernel, too
    return notebook


def machine_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """Paths of this machine that outputs show; sources are the author's business."""
    outputs = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    return [
        path
        for path in (str(FOLDER.parent), sys.prefix, str(pathlib.Path.home()) + "/")
        if path in outputs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change no file")
    parser.add_argument(
        "notebooks", nargs="*", type=pathlib.Path, help="default: all in this folder"
    )
    arguments = parser.parse_args()
    # pictures and numbers that every machine can repeat
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for path in arguments.notebooks or sorted(FOLDER.glob("*.ipynb")):
        begin = time.perf_counter()
        notebook = execute(path)
        if found := machine_paths(notebook):
            sys.exit(f"{path.name}: outputs show paths of this machine: {found}")
        if not arguments.check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
