"""The table of planted faults fits the package: `run.py` can plant each of them."""

from fault_table import (
    ROOT,
    TABLES,
    Fault,
    planted,
    problems_of,
    read_faults,
    read_sources,
    room_of,
)

FAULTS = read_faults(TABLES)
SOURCES = read_sources(ROOT / "jaxfp8")


def test_each_text_occurs_once_in_the_package_and_each_fault_parses():
    problems = problems_of(FAULTS, SOURCES)
    assert not problems, "\n".join(problems)


def test_each_fault_names_an_existing_file_and_says_what_breaks():
    assert not [fault.id for fault in FAULTS if fault.file not in SOURCES]
    assert not [fault.id for fault in FAULTS if not fault.breaks.endswith(".")]


def test_every_room_has_a_fault():
    rooms = {room_of(path) for path in SOURCES if "/" in path}
    assert rooms
    assert not rooms - {room_of(planted(fault, SOURCES)[0]) for fault in FAULTS}


def test_a_fault_that_does_not_fit_is_found():
    sources = {"a.py": "x = 1\ny = 1\n", "b.py": "z = 2\n"}
    rows = [
        ("= 1", "= 2"),
        ("q", "r"),
        ("z = 2", "z = (2)"),
        ("z = 2", "z = ("),
        ("z = 2", "z = 3"),
    ]
    faults = [Fault(str(i), "a.py", *row, "A sum.") for i, row in enumerate(rows)]
    found = problems_of(faults, sources)
    assert [problem.partition(":")[0] for problem in found] == ["0", "1", "2", "3"]
