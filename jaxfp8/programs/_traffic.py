"""The collectives of a program, counted as often as one run executes them."""

from jaxfp8.programs._hlo import BRANCHES, CALLS, Instruction, Program
from jaxfp8.programs._transfer import Transfer, transfers_of


class Traffic:
    """The transfers of the computations of a program. Each computation is read once.

    Args:
      program: read by `read_program`.
      trip_count: how often a loop runs if the program does not know its count. With None, such a
        loop is an error if it contains a collective.
      every_branch: whether to count all branches of a conditional. By default only the branch that
        sends the most bytes counts.
    """

    def __init__(
        self, program: Program, *, trip_count: int | None = None, every_branch: bool = False
    ) -> None:
        self.program = program
        self.trip_count = trip_count
        self.every_branch = every_branch
        self.loops_of_unknown_length: list[str] = []
        self._known: dict[str, tuple[Transfer, ...]] = {}

    def of(self, name: str) -> tuple[Transfer, ...]:
        """The transfers of one run of a computation and of all that it calls.

        Raises:
          ValueError: if a collective is in a loop of unknown length, or the text is not complete.
        """
        if name not in self._known:
            if name not in self.program.computations:
                raise ValueError(
                    f"the text calls a computation {name} that it does not hold. Pass all of it."
                )
            computation = self.program.computations[name]
            found: list[Transfer] = []
            for instruction in computation.values():
                if not instruction.is_second_half:  # its `-start` was counted
                    found += transfers_of(instruction, computation, self.program)
                    found += (
                        self._in_calls(instruction)
                        + self._in_branches(instruction)
                        + self._in_loop(instruction)
                    )
            self._known[name] = tuple(found)
        return self._known[name]

    def _in_calls(self, instruction: Instruction) -> list[Transfer]:
        return [t for name in instruction.computations(*CALLS) for t in self.of(name)]

    def _in_branches(self, instruction: Instruction) -> list[Transfer]:
        branches = [self.of(name) for name in instruction.computations(*BRANCHES)]
        if not self.every_branch:
            branches = [
                max(branches, key=lambda branch: sum(t.wire_bytes for t in branch), default=())
            ]
        return [t for branch in branches for t in branch]

    def _in_loop(self, loop: Instruction) -> list[Transfer]:
        body = [t for name in loop.computations("body") for t in self.of(name)]
        condition = [t for name in loop.computations("condition") for t in self.of(name)]
        times = loop.trip_count
        if times is None and (body or condition):
            self.loops_of_unknown_length.append(loop.label)
            times = self.trip_count
            if times is None:
                raise ValueError(
                    f"a {(body + condition)[0].kind} is in a loop whose length the program does "
                    f"not know: {loop.label}. Pass trip_count=, or use a loop of fixed length "
                    "(jax.lax.scan)."
                )
        # The condition runs once more than the body: its last run ends the loop.
        every_time = [(t, times or 0) for t in body] + [(t, (times or 0) + 1) for t in condition]
        return [t._replace(times=t.times * n) for t, n in every_time if n]
