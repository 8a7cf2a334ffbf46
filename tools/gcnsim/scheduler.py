# SPDX-License-Identifier: Apache-2.0
"""Control flow: which waves run next, how they part at branches, meet again, and wait at barriers.

Waves at the same instruction form a cohort and run as one. At a branch that only some of them take, the cohort splits.
The cohort furthest behind runs first, so that waves that left a loop early wait for the others and merge with them;
one that waits for long gets its turn all the same, so that a wave that spins on a flag ends up seeing it.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from gcnsim.decode import locate_error
from gcnsim.errors import Deadlock, GcnSimError
from gcnsim.launch import Launch, Residents, pack_arguments
from gcnsim.memory import Memory
from gcnsim.registers import Array, Cohort, join

# A cohort that has waited for this many runs of others goes first; it then runs for at most as many.
FAIRNESS = 256
# Until this many runs every write counts as progress; from then on only one that changes memory.
UNWATCHED_RUNS = 1000


def run(
    launches: Sequence[Launch | Sequence[Launch]],
    memory: Memory,
    resident_waves: int = 256,
    max_idle_runs: int = 200_000,
    detect_races: bool = True,
) -> None:
    """Runs launches together on one memory, until all of them have ended.

    A sequence in the place of a launch is a stream: each of its launches begins when the one before has ended.

    Workgroups of a launch become resident in grid order, as many at a time as `resident_waves` waves hold (one at
    least); waves of resident workgroups all make progress, of all launches.

    Raises:
        Deadlock: every wave waits, or all have come back to a state they were in before, with memory unchanged since;
            or memory has not changed, and no wave ended, for `max_idle_runs` straight pieces of code.
        LdsRace: with `detect_races`, waves exchange data through LDS without a barrier between.
        GcnSimError: the other errors of `gcnsim.errors`.
    """
    streams = [iter([launch] if isinstance(launch, Launch) else launch) for launch in launches]

    def begin(stream: Iterator[Launch]) -> "Execution | None":
        ready = (Execution(launch, memory, resident_waves, detect_races) for launch in stream)
        return next((execution for execution in ready if not execution.done), None)

    executions = [begin(stream) for stream in streams]
    idle = 0
    seen: dict[int, list[int]] = {}  # states since memory changed last, and the runs of each execution by then
    with np.errstate(all="ignore"):
        while True:
            executions = [
                begin(stream) if execution and execution.done else execution
                for execution, stream in zip(executions, streams, strict=True)
            ]
            live = [execution for execution in executions if execution]
            if not live:
                return
            before = sum(execution.progress for execution in live)
            runs = sum(execution.turn(FAIRNESS) for execution in live)
            if runs == 0:
                raise _deadlock("every wave waits", live)
            if sum(execution.progress for execution in live) != before:
                idle = 0
                seen.clear()
                continue
            idle += runs
            state = hash(tuple(execution.fingerprint() for execution in live))
            then = seen.setdefault(state, [execution.runs for execution in live])
            if all(execution.all_ran_since(runs) for execution, runs in zip(live, then, strict=True)):
                raise _deadlock("the same instructions again and again, on the same registers and memory", live)
            if idle > max_idle_runs:
                raise _deadlock(f"no change of memory in {idle} straight pieces of code", live)


def _deadlock(reason: str, executions: Sequence["Execution"]) -> Deadlock:
    return Deadlock("\n".join([f"deadlock: {reason}", *(line for e in executions for line in e.report())]))


class Execution:
    """A launch while it runs."""

    def __init__(self, launch: Launch, memory: Memory, resident_waves: int, detect_races: bool):
        self.launch = launch
        self.memory = memory
        self.detect_races = detect_races
        self.done = False
        self._cohorts: list[Cohort] = []
        self._pending = launch.workgroups()
        self._batch = max(resident_waves // launch.num_warps, 1)
        self._kernarg = memory.allocate(np.frombuffer(pack_arguments(launch), np.uint8), f"arguments of {launch.name}")
        self._runs = 0
        self._ended = 0
        self._admit()

    @property
    def progress(self) -> int:
        """Grows whenever memory changes or waves end."""
        return self.memory.store.changes + self._residents.lds.store.changes + self._ended

    @property
    def runs(self) -> int:
        """How many straight pieces of code have run."""
        return self._runs

    def all_ran_since(self, runs: int) -> bool:
        """Has every cohort that does not wait at a barrier had its turn since so many pieces of code had run?"""
        return all(cohort.waiting or cohort.last_run > runs for cohort in self._cohorts)

    def fingerprint(self) -> int:
        """A hash of all that waves do not share: registers, places in the code, scratch."""
        parts = [self._residents.scratch.store.data.tobytes()]
        for cohort in self._cohorts:
            parts += [cohort.vector.tobytes(), cohort.scalar.tobytes(), cohort.scc.tobytes(), b"%d" % cohort.pc]
        return hash(tuple(parts))

    def turn(self, limit: int) -> int:
        """Runs up to `limit` straight pieces of code and returns how many; 0 where every wave waits."""
        start = self._runs
        while not self.done and self._runs - start < limit:
            cohort = self._next()
            if cohort is None:
                break
            self._advance(cohort, limit - (self._runs - start))
            cohort.last_run = self._runs
        if self._runs > UNWATCHED_RUNS:
            self.memory.store.watched = self._residents.lds.store.watched = True
        return self._runs - start

    def report(self) -> list[str]:
        """One line a cohort: which waves are where."""
        lines = []
        for cohort in self._cohorts:
            number = cohort.pc - 1 if cohort.waiting else cohort.pc
            instruction = self.launch.program.instructions[number]
            waves: dict[tuple[int, int, int], list[int]] = {}
            for workgroup, wave in zip(cohort.workgroup, cohort.wave, strict=True):
                waves.setdefault(self._residents.workgroups[workgroup], []).append(int(wave))
            where = ", ".join(f"workgroup {group} wave {numbers}" for group, numbers in islice(waves.items(), 4))
            more = f" and {len(waves) - 4} more workgroups" if len(waves) > 4 else ""
            state = "waits at" if cohort.waiting else "runs at"
            lines.append(
                f"  {self.launch.name}: {where}{more} {state} assembly line {instruction.line}: {instruction.text}"
                f" ({instruction.source or 'no source line'})"
            )
        return lines

    # --- which cohort runs

    def _admit(self) -> None:
        """Makes the next workgroups resident, once all before them have ended."""
        workgroups = list(islice(self._pending, self._batch))
        if not workgroups:
            self.done = True
            return
        self._residents = Residents(self.launch, self.memory, self._kernarg, workgroups, self.detect_races)
        self._cohorts = [self._residents.start()]
        self._alive = np.full(len(workgroups), self.launch.num_warps)
        self._waiting = np.zeros(len(workgroups), np.int64)

    def _next(self) -> Cohort | None:
        runnable = [cohort for cohort in self._cohorts if not cohort.waiting]
        if len(runnable) < 2:
            return runnable[0] if runnable else None
        oldest = min(runnable, key=lambda cohort: cohort.last_run)
        if self._runs - oldest.last_run > FAIRNESS:
            return oldest
        return min(runnable, key=lambda cohort: cohort.pc)

    def _advance(self, cohort: Cohort, limit: int) -> None:
        """Runs a cohort until it splits, waits, ends or meets another one, or for `limit` straight pieces of code."""
        code = self.launch.code
        others = {other.pc for other in self._cohorts if other is not cohort and not other.waiting}
        for _ in range(limit):
            self._runs += 1
            self._run_straight(cohort)
            if branch := code.branches.get(cohort.pc):
                taken = branch.condition(cohort) if branch.condition else np.ones(cohort.waves, bool)
                if taken.all():
                    cohort.pc = branch.target
                elif taken.any():
                    self._split(cohort, taken, branch.target)
                    return
                else:
                    cohort.pc += 1
            elif cohort.pc < len(code.steps) and code.steps[cohort.pc] is None:
                if self.launch.program.instructions[cohort.pc].op == "s_barrier":
                    self._arrive(cohort)
                else:
                    self._end(cohort)
                return
            if cohort.pc in others:
                self._merge()
                return

    def _run_straight(self, cohort: Cohort) -> None:
        code = self.launch.code
        steps, start, end = code.steps, cohort.pc, code.run_end[cohort.pc]
        number = start
        try:
            for number in range(start, end):
                steps[number](cohort)  # type: ignore[misc]  # run_end stops before what has no step
        except GcnSimError as error:
            raise locate_error(error, code.program.instructions[number]) from None
        except Exception as error:
            instruction = code.program.instructions[number]
            error.add_note(f"in gcnsim, at assembly line {instruction.line}: {instruction.text}")
            raise
        cohort.pc = end

    # --- parting and meeting

    def _split(self, cohort: Cohort, taken: Array, target: int) -> None:
        there, here = cohort.select(taken), cohort.select(~taken)
        there.pc = target
        here.pc += 1
        self._cohorts.remove(cohort)
        self._cohorts += [here, there]
        self._merge()

    def _merge(self) -> None:
        """Joins cohorts that stand at the same instruction."""
        places: dict[tuple[int, bool], list[Cohort]] = {}
        for cohort in self._cohorts:
            places.setdefault((cohort.pc, cohort.waiting), []).append(cohort)
        self._cohorts = [join(cohorts) for cohorts in places.values()]

    # --- barriers and the end

    def _arrive(self, cohort: Cohort) -> None:
        cohort.pc += 1
        cohort.waiting = True
        self._waiting += np.bincount(cohort.workgroup, minlength=len(self._waiting))
        self._release()

    def _end(self, cohort: Cohort) -> None:
        """Waves that end no longer take part in barriers."""
        self._cohorts.remove(cohort)
        self._ended += cohort.waves
        self._alive -= np.bincount(cohort.workgroup, minlength=len(self._alive))
        self._release()
        if not self._cohorts:
            self._admit()

    def _release(self) -> None:
        """Lets the workgroups go of which every living wave has arrived."""
        complete = (self._waiting == self._alive) & (self._waiting > 0)
        if not complete.any():
            return
        self._residents.lds.barrier(np.flatnonzero(complete))
        cohorts = []
        for cohort in self._cohorts:
            rows = complete[cohort.workgroup] & cohort.waiting
            parts = [cohort] if rows.all() or not rows.any() else [cohort.select(rows), cohort.select(~rows)]
            if rows.any():
                parts[0].waiting = False
                parts[0].last_run = self._runs
            cohorts += parts
        self._cohorts = cohorts
        self._waiting[complete] = 0
        self._merge()
