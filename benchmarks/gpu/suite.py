"""Runs the sections in order, each within its time. Results are on disk after every group."""

import collections
import concurrent.futures
import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import case as programs
import casts
import checks
import experts
import jax
import jax.numpy as jnp
import layers
import matmuls
import report
import steps
from case import Case, Compiled
from target import Target
from timing import Buffers, Inputs, Runner, rounds, summary

from jaxfp8.kernels._dispatch import recorded

# The most important sections come first. If a section leaves time, the next one gets it.
COPIES = "copies"
SHARES = {
    COPIES: 0.05,
    "checks": 0.2,
    "casts": 0.2,
    "layers": 0.2,
    "steps": 0.2,
    "experts": 0.15,
    "matmuls": 0.2,
}
BASELINES = {
    casts.SECTION: None,
    layers.SECTION: layers.BASELINE,
    steps.SECTION: steps.BASELINE,
    experts.SECTION: experts.BASELINE,
    matmuls.SECTION: matmuls.BASELINE,
}
CHOSEN = (casts.SECTION, matmuls.SECTION)
"""The sections whose cases name a backend. Their rows say which one is chosen by itself."""
CHECKED_FIRST = {
    f"{casts.named(checks.CAST_SHAPES[0][0])} bfloat16",
    f"{casts.named(checks.MATMUL_SHAPE)} bfloat16",
    experts.CHECKED[0].name,
}
"""The groups of checks that stand for the others, if there is no time to compile all of them."""
LEAST_SECONDS = 0.02
"""The least time of the calls that are timed together.

The wait at the end takes some tens of microseconds, which is then less than a percent.
"""
COMPILING = 0.7
"""The most of the time that is left in which the programs of a group are compiled.

A group of layers compiles for minutes. Without a rest each of them would be timed once only.
"""
MOST_THREADS = 8
"""The most threads that compile.

On a GPU timed matmuls are compiled one after the other. There XLA times kernels when it compiles,
and other work would disturb it.
"""


@dataclasses.dataclass(kw_only=True)
class Suite:
    """A run.

    Attributes:
      target: the device that programs are compiled for and run on.
      result: the content of the JSON file. Each case adds a row to `result["rows"]`.
      path: path of the JSON file, or None.
      minutes: time of the whole run.
      rounds: number of times that each case is timed.
      tiny: True for the smallest shapes, with one call of each program.
      match: texts. A case is left out unless its name contains one of them.
      compile_only: True if no program runs.
      first: the first group of each section.
      compile_seconds: the seconds of all programs of a section.
      choices: the backend that `fp8.Kernels` choose for each operation and its arguments.
    """

    target: Target
    result: dict[str, Any]
    path: Path | None
    minutes: float
    rounds: int
    tiny: bool = False
    match: tuple[str, ...] = ()
    compile_only: bool = False
    start: float = dataclasses.field(default_factory=time.perf_counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    choices: dict[Any, str] = dataclasses.field(default_factory=dict)
    compile_seconds: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )

    def run(self, sections: Iterable[str]) -> None:
        sections = [name for name in SHARES if name in set(sections)]
        threads = concurrent.futures.ThreadPoolExecutor
        self.pool, self.one_by_one = threads(min(os.cpu_count() or 1, MOST_THREADS)), threads(1)
        try:
            if self.compile_only:
                self.compile_all(sections)
            else:
                self.run_sections(sections)
        finally:
            for pool in (self.pool, self.one_by_one):
                # A rehearsal leaves a program that is not ready in time.
                pool.shutdown(wait=not self.compile_only, cancel_futures=True)

    def compile_all(self, sections: list[str]) -> None:
        """A rehearsal: the important cases of all sections, and then the others."""
        # All are listed before the first one is compiled. At the end threads may still compile, and
        # what is left out must be written without delay.
        every = {section: list(filter(self.wanted, self.cases(section))) for section in sections}
        first = {section: list(filter(self.is_important, every[section])) for section in sections}
        left = {s: [case for case in every[s] if case not in {*first[s]}] for s in sections}
        self.compile_until = self.end
        list(self.compiled(self.turns(first)))  # it yields programs that are to run, so none
        for section, deadline in self.deadlines(sections):
            self.compile_until = deadline
            list(self.compiled(left[section]))

    def turns(self, cases: dict[str, list[Case]]) -> Iterator[Case]:
        """Cases of all sections. The next one is of the section that compiled for the least time.

        So a train step, which compiles for half a minute, leaves time for kernels.
        """
        queues = {section: iter(of_section) for section, of_section in cases.items()}
        while queues:
            section = min(queues, key=lambda name: self.compile_seconds[name])
            if (case := next(queues[section], None)) is None:
                del queues[section]
            else:
                self.compile_seconds[section] += 1.0  # to lower it, until the rest is known
                yield case

    @property
    def end(self) -> float:
        return self.start + 60 * self.minutes

    def run_sections(self, sections: list[str]) -> None:
        for section, deadline in self.deadlines(sections):
            began, self.deadline = time.perf_counter(), deadline
            if section == checks.SECTION:
                self.check()
            else:
                self.time(self.cases(section))
            self.result["section_seconds"][section] = round(time.perf_counter() - began, 1)
            self.write()

    def deadlines(self, sections: list[str]) -> Iterator[tuple[str, float]]:
        """Divides the time that is left. What a section leaves is for the next ones."""
        begin, used = time.perf_counter(), 0.0
        for section in sections:
            used += SHARES[section] / sum(SHARES[name] for name in sections)
            yield section, begin + used * (self.end - begin)

    def cases(self, section: str) -> Iterator[Case]:
        return (dataclasses.replace(case, tiny=self.tiny) for case in self.all_cases(section))

    def all_cases(self, section: str) -> Iterator[Case]:
        if section == COPIES:
            for shape in casts.TINY_SHAPES if self.tiny else casts.SHAPES[:3]:
                yield from casts.copies(shape, section)
        elif section == checks.SECTION:
            yield from (check.case for check in self.all_checks(self.target.device))
        elif section == casts.SECTION:
            yield from casts.cases(casts.TINY_SHAPES if self.tiny else casts.SHAPES, self.target)
        elif section == layers.SECTION:
            yield from layers.cases(layers.TINY_BLOCKS if self.tiny else layers.BLOCKS, self.target)
        elif section == steps.SECTION:
            yield from steps.cases(steps.TINY_STACKS if self.tiny else steps.STACKS, self.target)
        elif section == experts.SECTION:
            yield from experts.cases(
                experts.TINY_LAYERS if self.tiny else experts.LAYERS, self.target
            )
        elif section == matmuls.SECTION:
            yield from matmuls.cases(
                matmuls.TINY_SHAPES if self.tiny else matmuls.SHAPES, self.target
            )

    # Checking

    def all_checks(self, reference: Any) -> Iterator[checks.Check]:
        for part in (checks, experts):
            yield from part.checks(self.target, tiny=self.tiny, reference=reference)

    def check(self) -> None:
        self.compile_until = self.deadline
        reference = _cpu() or self.target.device
        self.result["reference_on"] = reference.platform
        every = {c.case: c for c in self.all_checks(reference) if self.wanted(c.case)}
        some = [c for c in every.values() if not c.case.why_not(self.target)]
        wanted = checks.wanted_by_all(some, self.pool)
        for compiled in self.compiled([*every]):
            check = every[compiled.case]
            try:
                expected = wanted[check.wanted].result()
                found = checks.judge(
                    check, compiled.program, compiled.results, expected, self.target.device
                )
            except Exception as error:
                found = {"error": report.one_line(error)}
            reason = found.pop("error", None)
            self.add(compiled.case, "failed" if reason else "ok", reason, **found)
            self.write()  # now, because the next kernel may hang

    # Timing

    def time(self, cases: Iterable[Case]) -> None:
        """Times one group after the other, and compares each case with its baseline."""
        inputs, buffers = Inputs(self.target.device), Buffers(self.target.device)
        for _, group in itertools.groupby(cases, key=lambda case: case.group):
            now = time.perf_counter()
            self.compile_until = now + COMPILING * (self.deadline - now)
            runners = [
                r for c in self.compiled(list(group)) if (r := self.runner(c, inputs, buffers))
            ]
            seconds: dict[Runner, dict[int, float]] = {runner: {} for runner in runners}
            for number, runner, took in rounds(runners, self.rounds, late=self.late):
                if isinstance(took, Exception):
                    self.add(runner.compiled.case, "failed", report.one_line(took))
                    del seconds[runner]
                else:
                    seconds[runner][number] = took
            self.add_times(seconds)
            del runners, seconds
            inputs.forget()
            buffers.forget()
            self.result["device_memory"] = report.memory(self.target.device)
            self.write()

    def runner(self, compiled: Compiled, inputs: Inputs, buffers: Buffers) -> Runner | None:
        """The program with its inputs, after its warm-up. None if it fails."""
        case = compiled.case
        try:
            arguments = case.inputs and [case.inputs(compiled.program, inputs)]
            runner = Runner(compiled, inputs, buffers, arguments)
            runner.warm_up(0.0 if self.tiny else LEAST_SECONDS)
            return runner
        except Exception as error:
            self.add(case, "failed", report.one_line(error))
            return None

    def add_times(self, seconds: dict[Runner, dict[int, float]]) -> None:
        by_case = {runner.compiled.case: times for runner, times in seconds.items()}
        for runner, times in seconds.items():
            case = runner.compiled.case
            found = summary([*times.values()])
            row: dict[str, Any] = {
                "seconds": found,
                "calls": runner.calls,
                "turns": case.turns,
                "sets": case.sets,
            }
            if case.bytes:
                row |= {
                    "floor_bytes": case.bytes,
                    "gib_per_s": case.bytes / found["median"] / report.GIB,
                }
            if case.flops:
                row |= {"flops": case.flops, "tflops": case.flops / found["median"] / 1e12}
            baseline = BASELINES.get(case.section)
            for other, their in by_case.items():
                if (other.operation, other.contender) == (case.operation, baseline):
                    row["speedup"] = summary([their[n] / t for n, t in times.items() if n in their])
            self.add(case, "ok", None, **self.read[case], **row)

    # Programs

    def compiled(self, cases: Iterable[Case]) -> Iterator[Compiled]:
        """The programs of these cases, compiled in parallel.

        A case without a program gets a row with the reason.
        """
        self.read: dict[Case, dict[str, Any]] = {}
        futures: dict[Case, concurrent.futures.Future] = {}
        for case in filter(self.wanted, cases):
            if reason := case.why_not(self.target):
                self.add(case, "skipped", reason)
                continue
            if self.too_late_to_compile():
                self.add(case, "skipped", "no time left")
                continue
            try:
                lowered, results = programs.lower(case, self.target)
            except NotImplementedError as error:
                self.add(case, "skipped", " ".join(str(error).split()))
            except Exception as error:
                self.add(case, "failed", report.one_line(error))
            else:
                pool = self.one_by_one if case.flops and not self.compile_only else self.pool
                futures[case] = pool.submit(programs.compile, case, lowered, results)
                if self.compile_only:
                    self.collect(futures)
        done = [(case, self.finished(case, future)) for case, future in futures.items()]
        if not self.compile_only:
            yield from (compiled for _, compiled in done if compiled)

    def collect(self, futures: dict[Case, concurrent.futures.Future]) -> None:
        """Writes what is compiled. A rehearsal lowers no more than it has time to compile."""
        while sum(not future.done() for future in futures.values()) > (os.cpu_count() or 1):
            left = max(self.end - time.perf_counter(), 0.0)
            if not concurrent.futures.wait(futures.values(), left, "FIRST_COMPLETED").done:
                break
            for case in [case for case, future in futures.items() if future.done()]:
                self.finished(case, futures.pop(case))

    def finished(self, case: Case, future: concurrent.futures.Future) -> Compiled | None:
        """Wait for a program, and check it. None if it is skipped or fails."""
        left = max(self.end - time.perf_counter(), 0.0) if self.compile_only else None
        in_time = not (self.too_late_to_compile() and future.cancel())
        if not in_time or not concurrent.futures.wait([future], left).done:
            self.add(case, "skipped", "no time left")
            return None
        try:
            compiled = future.result()
            self.compile_seconds[case.section] += compiled.seconds
            self.read[case] = {
                "compile_seconds": round(compiled.seconds, 2),
                **compiled.check(self.target),
            }
        except Exception as error:
            self.add(case, "failed", report.one_line(error))
            return None
        if self.compile_only:
            self.add(case, "compiled", None, **self.read[case])
            self.write()
        return compiled

    # The result

    def wanted(self, case: Case) -> bool:
        return not self.match or any(part in case.name for part in self.match)

    def is_important(self, case: Case) -> bool:
        """Whether a rehearsal compiles it first.

        It is of the first shape. Where cases name a backend it is a kernel. Elsewhere it has the
        kernels that are chosen.
        """
        groups = (
            CHECKED_FIRST
            if case.section == checks.SECTION
            else {self.first.setdefault(case.section, case.group)}
        )
        by_backend = case.section in (checks.SECTION, *CHOSEN)
        by_kernel = bool({*case.named.values()} - programs.PORTABLE)
        return case.group in groups and (not case.named or (by_backend and by_kernel))

    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def too_late_to_compile(self) -> bool:
        return time.perf_counter() > self.compile_until

    def add(self, case: Case, status: str, reason: str | None, **figures: Any) -> None:
        row = {
            "section": case.section,
            "group": case.group,
            "operation": case.operation,
            "contender": case.contender,
        }
        row |= {"status": status} | ({"reason": reason} if reason else {}) | figures
        row |= {"named": dict(case.named)} if case.named else {}
        if case.section in CHOSEN and case.named and status in ("ok", "compiled"):
            row["chosen"] = self.chosen(case)
        self.result["rows"].append(row)
        short = reason or (
            "" if "seconds" not in row else f"{row['seconds']['median'] * 1e6:.1f} us"
        )
        print(f"{status:8} {case.name}  {short}", flush=True)

    def chosen(self, case: Case) -> str:
        """The backend that `fp8.Kernels(chip)` chooses for this cast or matmul by itself."""
        leaves, structure = jax.tree.flatten(case.arguments)
        key = case.operation, structure, *leaves
        if key not in self.choices:
            if case.section == casts.SECTION:
                ways = {way.name: way for way in (*casts.CASTS, *casts.BESIDES)}
                run = ways[case.operation].by(None, self.target.chip)
            else:
                dtype = jnp.bfloat16 if len(case.arguments) == 2 else jnp.float32
                run = matmuls.scaled(case.operation, None, self.target.chip, dtype=dtype)
            with self.target.context(), recorded() as ran:
                jax.eval_shape(run, *case.arguments)
            self.choices[key] = ran[-1].backend
        return self.choices[key]

    def write(self) -> None:
        self.result["seconds"] = round(time.perf_counter() - self.start, 1)
        moved = [row for row in self.result["rows"] if "gib_per_s" in row]
        best = max((row["gib_per_s"] for row in moved if row["contender"] == "copy"), default=None)
        self.result["copy_gib_per_s"] = best
        for row in moved if best else ():
            if row["section"] in (COPIES, casts.SECTION):
                row["share_of_copy"] = row["gib_per_s"] / best
        if self.path is not None:
            report.write(self.path, self.result)


def _cpu() -> Any:
    """A CPU device of jax. None if JAX_PLATFORMS leaves out CPUs."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def failures(result: dict[str, Any]) -> int:
    """The number of checks that failed. With --compile-only, of all cases that failed."""
    counted = SHARES if result["compile_only"] else (checks.SECTION,)
    return sum(row["status"] == "failed" and row["section"] in counted for row in result["rows"])
