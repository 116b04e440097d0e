"""List the benchmarks: the path of each script, what it measures, and what it needs.

    python benchmarks

Nothing is imported. A line has the first line of the script's docstring, and its line `Needs: ...`,
which names what `pip install jaxfp8` does not bring. Files without `if __name__ == "__main__":`
are parts of a script, and have no line.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NEEDS = "Needs: "


def scripts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (path, line) of each script in `folder` and in its folders, but not of this one."""
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests = [ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)]
        if "__name__ == '__main__'" in tests and path.name != "__main__.py":
            first, *more = (ast.get_docstring(tree) or "").splitlines()
            needs = [line.removeprefix(NEEDS) for line in more if line.startswith(NEEDS)]
            yield (
                path.relative_to(folder.parent).as_posix(),
                " ".join([first, *(f"[needs {each.removesuffix('.')}]" for each in needs)]),
            )


def main() -> None:
    lines = dict(scripts(FOLDER))
    width = max(map(len, lines))
    for path, line in lines.items():
        print(f"{path:{width}}  {line}")


if __name__ == "__main__":
    main()
