"""Reads the machine code of a kernel for a TPU: how often each bundle runs.

A bundle is what a TensorCore issues in a cycle, a VLIW instruction. It issues them in order. So a
kernel takes at least as many cycles as it runs bundles. The text is what libtpu dumps, see
`_tpu_clocks.py`. What cannot be read is None.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Runs(NamedTuple):
    """How often one run of a kernel executes something.

    Attributes:
      bundles: at least and at most; None if a loop is of unknown length.
      matmuls: at least, on the matrix unit that has most. Those of bfloat16 and FP8 count. None if
        most are of another format.
      grid: the blocks of the grid, as the compiler prints them; -1 for a size that is data.
      loops: the length of each loop, in the order of the text; None for an unknown one.
    """

    bundles: tuple[int, int] | None
    matmuls: int | None
    grid: tuple[int, ...]
    loops: tuple[int | None, ...]


_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +((?:[A-Z]{2} *)*):(?: (>+))? +\{(.*)")
_JUMP = re.compile(r"sbr\.rel \((!?%[\w.]+)\) target = \$region(\d+)")
_START = re.compile(r"Start region (\d+)\b")
_END_OF_JUMP = re.compile(r"/\* Start/End empty region (\d+) |:: Start/End empty region (\d+) ")
_MATMUL = re.compile(r"\bvmatmul\.mubr\.(bf16|f8|)\S*\.mxu(\d)")
_GRID = re.compile(r"^iteration_bounds: \(([\d, ]+)\)", re.MULTILINE)
_DATA = 2**31 - 1  # a size that is data
_LONGEST = 10**5  # steps of a loop that are followed


class _Bundle(NamedTuple):
    depth: int  # of the loops around it
    begins: bool  # a loop begins here
    text: str


class _Span(NamedTuple):
    """A loop, or a part that a jump leaves out: its first and last bundle."""

    first: int
    last: int
    predicate: str  # of the jump

    def holds(self, other: "_Span") -> bool:
        return self.first <= other.first and other.last <= self.last


def runs_of(text: str, *, steps: int | None = None, parts: Sequence[int] = ()) -> Runs:
    """Reads the final bundles of a kernel.

    Jumps outside of loops are taken for those of an empty grid, and so for not taken.

    `steps`: how often a loop runs whose length is data. It is taken for the loop over the grid. A
    part of it that may be skipped counts if it is more than half of the loop, because then it is
    the work of a step.

    `parts`: how often each part of a loop runs that data decides, in the order of the text. Parts
    of less than 1/20 of the loop are left out. It has no effect on a kernel with another number of
    such parts.
    """
    bundles = _bundles(text)
    scalars = _Scalars(bundles)
    loops, skips = _loops(bundles), _skips(bundles)
    # Each skip belongs to the innermost loop around it.
    owners = [
        max((n for n, loop in enumerate(loops) if loop.holds(skip)), default=None) for skip in skips
    ]
    followed = [
        scalars.follow(bundles, loop, [s for s, n in zip(skips, owners, strict=True) if n == own])
        for own, loop in enumerate(loops)
    ]
    by_data = [
        n
        for n, (skip, own) in enumerate(zip(skips, owners, strict=True))
        if own is not None
        and (trace := followed[own]) is not None
        and any(step[skip] is None for step in trace)
        and 20 * (skip.last - skip.first) > loops[own].last - loops[own].first
    ]
    given = dict(zip(by_data, parts, strict=True)) if len(by_data) == len(parts) else {}
    weights: dict[tuple[int, ...], tuple[int, int] | None] = {}

    def weight(inside: list[int], skipped: list[int]) -> tuple[int, int] | None:
        least = most = 1
        for own in inside:
            if counts := [given[n] for n in skipped if owners[n] == own and n in given]:
                least, most = least * min(counts), most * min(counts)
                continue
            parts = [skips[n] for n in skipped if owners[n] == own]
            if (trace := followed[own]) is not None:
                runs = [[step[skip] for skip in parts] for step in trace]
                least *= sum(all(each is False for each in step) for step in runs)
                most *= sum(not any(step) for step in runs)
            elif steps is None:
                return None
            else:
                size = loops[own].last - loops[own].first
                sure = all(2 * (part.last - part.first) > size for part in parts)
                least, most = least * steps * sure, most * steps
        return least, most

    count, units, others = [0, 0], {"0": 0, "1": 0}, 0
    for i, bundle in enumerate(bundles):
        here = _Span(i, i, "")
        inside = [n for n, loop in enumerate(loops) if loop.holds(here)]
        skipped = [n for n, skip in enumerate(skips) if skip.holds(here) and owners[n] is not None]
        key = (*inside, -1, *skipped)
        if key not in weights:
            weights[key] = weight(inside, skipped)
        times = weights[key] or (0, 0)
        count = [total + each for total, each in zip(count, times, strict=True)]
        for counted, unit in _MATMUL.findall(bundle.text):
            units[unit] += times[0] if counted else 0
            others += 0 if counted else times[0]
    known = None not in weights.values()
    return Runs(
        (count[0], count[1]) if known else None,
        max(units.values()) if known and others <= sum(units.values()) else None,
        grid_of(text),
        tuple(None if trace is None else len(trace) for trace in followed),
    )


def grid_of(text: str) -> tuple[int, ...]:
    """The blocks of the grid, as in `Runs`."""
    grid = _GRID.search(text)
    sizes = [int(size) for size in grid[1].split(",") if size.strip()] if grid else []
    return tuple(-1 if size == _DATA else size for size in sizes)


def _bundles(text: str) -> list[_Bundle]:
    """The bundles. A line that is none belongs to the one before."""
    found: list[_Bundle] = []
    for line in text.splitlines():
        if new := _BUNDLE.match(line):
            # An empty bundle has no mark of the loop around it.
            empty = new[3].lstrip().startswith("}")
            depth = found[-1].depth if empty and found else len(new[2] or "")
            found.append(_Bundle(depth, "LB" in new[1], new[3]))
        elif found:
            found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{line}")
    return found


def _loops(bundles: list[_Bundle]) -> list[_Span]:
    found = []
    for first, bundle in enumerate(bundles):
        if not bundle.begins:
            continue
        # The jump back leads to a region that starts here.
        regions = _START.findall(bundle.text)
        for jump in range(first, len(bundles)):
            back = [p for p, region in _JUMP.findall(bundles[jump].text) if region in regions]
            if back:
                last = jump
                # Bundles behind a jump run before it takes effect.
                while (
                    last + 1 < len(bundles)
                    and bundles[last + 1].depth >= bundle.depth
                    and not bundles[last + 1].begins
                ):
                    last += 1
                found.append(_Span(first, last, back[-1]))
                break
        else:
            found.append(_Span(first, len(bundles) - 1, ""))
    return found


def _skips(bundles: list[_Bundle]) -> list[_Span]:
    ends = {
        region: i
        for i, bundle in enumerate(bundles)
        for found in _END_OF_JUMP.findall(bundle.text)
        for region in found
        if region
    }
    # The few bundles that run before a jump takes effect are taken for skipped.
    return [
        _Span(i + 1, ends[region] - 1, predicate)
        for i, bundle in enumerate(bundles)
        for predicate, region in _JUMP.findall(bundle.text)
        if ends.get(region, 0) > i
    ]


class _Scalars:
    """The scalar operations of a kernel, which are few, and followed step by step."""

    _assigned = re.compile(r"^\W*(%[\w.]+) = (\S+) +(.*)", re.DOTALL)
    _stored = re.compile(r"= sst \[smem:\[(#\w+_spill)\]\] (%[\w.]+)")
    _comment = re.compile(r"/\*.*?\*/", re.DOTALL)

    def __init__(self, bundles: list[_Bundle]):
        self._made: dict[str, tuple[str, list[str]]] = {}
        self._spilled: dict[str, str] = {}
        self._phis: list[tuple[int, str]] = []
        for i, bundle in enumerate(bundles):
            for operation in self._comment.sub("", bundle.text).split(";;"):
                if stored := self._stored.search(operation):
                    self._spilled[stored[1]] = stored[2]
                elif made := self._assigned.match(operation):
                    operands = [each.strip(" {}()\n") for each in made[3].split(",")]
                    self._made[made[1]] = made[2], operands
                    self._phis += [(i, made[1])] if made[2] == "sphi" else []

    def follow(
        self, bundles: list[_Bundle], loop: _Span, skips: list[_Span]
    ) -> list[dict[_Span, bool | None]] | None:
        """For each step of a loop which parts are skipped. None if its end is not known."""
        phis = [name for i, name in self._phis if loop.first <= i <= loop.last]
        state = {name: self.value(self._made[name][1][0], {}) for name in phis}
        trace: list[dict[_Span, bool | None]] = []
        while len(trace) < _LONGEST:
            known: dict[str, int | None] = dict(state)
            now = {}
            for skip in skips:
                value = self.value(skip.predicate, known)
                now[skip] = None if value is None else bool(value)
            trace.append(now)
            again = self.value(loop.predicate, known)
            if again is None:
                return None
            if not again:
                return trace
            state = {name: self.value(self._made[name][1][-1], known) for name in phis}
        return None

    def value(self, name: str, known: dict[str, int | None]) -> int | None:
        """A scalar or a predicate where others are known. None if it cannot be read."""
        if name.startswith("!"):
            value = self.value(name[1:], known)
            return None if value is None else int(not value)
        if not name.startswith("%"):
            number = int(name) if re.fullmatch(r"-?\d+", name) else None
            return number - 2**32 if number is not None and number >= 2**31 else number
        if name not in known:
            known[name] = None  # what depends on itself is not known
            known[name] = self._compute(*self._made.get(name, ("", [])), known)
        return known[name]

    def _compute(
        self, operation: str, names: list[str], known: dict[str, int | None]
    ) -> int | None:
        if operation == "sld":
            slot = re.search(r"#\w+_spill", names[0])
            return self.value(self._spilled.get(slot[0], ""), known) if slot else None
        args = [self.value(name, known) for name in names]
        if operation in ("smov", "scalar_select") and len(args) == 3:
            # A move has (predicate, otherwise), value. A selection has the other order.
            test, one, other = args if operation == "scalar_select" else (args[0], *args[:0:-1])
            return None if test is None else one if test else other
        # One operand may decide these, whatever the other is.
        if operation in ("pand", "pnand") and 0 in args:
            return int(operation == "pnand")
        if operation in ("por", "pnor") and any(args):
            return int(operation == "por")
        numbers = [each for each in args if each is not None]
        if len(numbers) != len(args) or len(args) not in (1, 2):
            return None
        a, b = numbers[0], numbers[-1]
        kind, _, rest = operation.partition(".")
        if kind == "scmp" and (rest[3:6] == "s32" or min(a, b) >= 0):
            tests = {
                "ge": a >= b,
                "gt": a > b,
                "le": a <= b,
                "lt": a < b,
                "eq": a == b,
                "ne": a != b,
            }
            return int(tests[rest[:2]])
        results = {
            "smov": a, "sadd": a + b, "ssub": a - b, "smul": a * b, "sand": a & b, "sor": a | b,
            "pneg": not a, "pmov": a, "pand": a and b, "pnand": not (a and b), "por": a or b,
            "pnor": not (a or b),
        }  # fmt: skip
        return int(results[kind]) if kind in results else None
