"""A thread of each rank that notices a training without progress, and reports who is where."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
import weakref
from collections import deque
from contextlib import nullcontext, suppress
from ctypes import PyDLL
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing import active_children
from statistics import median_low
from threading import Event, Thread, get_ident
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.background import wait_until
from lightning_perf.diagnosis.hang import FAILED, LEFT, RankState, culprits, report, sentence
from lightning_perf.errors import describe, warn
from lightning_perf.patches import PatchSet
from lightning_perf.run import compat
from lightning_perf.run.collective import Gatherer
from lightning_perf.run.flop_meter import COUNTING
from lightning_perf.run.hang_files import REPORT, HangFiles, stacks_file
from lightning_perf.run.hooks import PER_BATCH
from lightning_perf.run.spans import START
from lightning_perf.run.summary import add_hang
from lightning_perf.system.frames import (
    collective_in,
    compiles,
    is_debugged,
    is_worker,
    main_thread,
    threads_in,
    users_frame,
)
from lightning_perf.system.stacks import Stacks, children_of, dump_of, native_stacks
from lightning_perf.timing.totals import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from lightning.pytorch import Trainer

    from lightning_perf.run.run import Run
    from lightning_perf.system.frames import Frame
    from lightning_perf.timing.clock import Clock

#: The exit code of a training that `Hang(action="abort")` ends: EX_TEMPFAIL, "try again".
ABORTED = 75
#: Seconds between two looks, or a tenth of a small limit.
_POLL = 5.0
#: Limits: in median batches; of phases that may take long, in limits; of what a phase took before.
_BATCHES, _LONGER, _BEFORE = 30, 5, 3
#: A report is written again once the hang has lasted this many times as long.
_GROWS = 2
#: Batches whose median counts.
_HISTORY = 100
#: Hangs of one run whose reports and stacks are kept in its files.
_KEPT = 10
#: Seconds that an abort waits for files and for uploads, and between two looks meanwhile.
_FLUSH, _SHORT = 30.0, 0.05
#: Seconds that it waits for other ranks.
_RANKS = 3 * _FLUSH
#: Seconds for which a rank that is aborted holds the GIL before its end, so that the others hold
#: theirs by then.
_TOGETHER = 0.2
#: Spans that may take long without a sign of life, besides checkpoints.
_SLOW = ("iter", "first fetch", "Trainer.epoch_values", COUNTING)
#: Seconds for the stacks of all child processes.
_CHILDREN = 30.0
#: The description of a frozen rank.
_FROZEN = "ran no Python meanwhile: C code held the GIL, or the process was stopped"


class Watchdog:
    """Watches the training of a run on a thread of its own; costs a step nothing.

    Progress is a batch that ends, or a span of the run's clock. Rank 0, or the lowest one that
    answers, reports what all ranks have written into the run's folder, or sent if they share none.

    Args:
        run: Watched until `close`, or until nothing else refers to it.
        after: Seconds without progress, at least, until the training hangs.
        abort: Whether a hang ends the process after its report.
        found: Called with the entry of each hang in `summary.json`, which is completed later.
    """

    def __init__(
        self, run: Run, after: float, abort: bool, found: Callable[[dict[str, Any]], None]
    ) -> None:
        self._run, self._clock = weakref.ref(run), run.require_times().clock
        self._after, self._abort, self._found = after, abort, found
        self._poll = min(_POLL, after / 10)
        self._stacks, self._failed, self._aborts = Stacks(), False, False
        self._stop, self._ready = Event(), Event()
        self._thread = Thread(target=self._loop, name="lightning_perf watchdog", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many threads
            self._stacks.close()
            raise
        self._ready.wait(_POLL)

    def close(self, trainer: Trainer, reason: str) -> None:
        """Stop, for a reason as that of `PerfCallback.close`; may be called more than once."""
        self._failed = reason == "exception"
        self._stop.set()
        # An exception while all ranks are aborted comes from the end of another one.
        self._thread.join(6 * _FLUSH if self._failed and self._aborts else _POLL)
        if not self._thread.is_alive():
            for number in self._stacks.numbers:
                compat.handlers_before(trainer).pop(number, None)
            self._stacks.close()
        if reason == "teardown" and (run := self._run()) is not None:
            run.on_close(partial(self._watch_end, run))

    def _watch_end(self, run: Run) -> None:
        """After the end of the run, report modules and loggers that hang in their own teardown."""
        patches, ended, main = PatchSet(), Event(), get_ident()

        def end() -> AbstractContextManager[None]:
            ended.set()
            patches.restore()
            thread.join(1.0)  # it ends at once; test suites look for threads that are left
            return nullcontext()

        def watch() -> None:
            began, limit = time.monotonic(), _LONGER * self._after
            while time.monotonic() < began + limit:
                has_ended = ended.wait(min(1.0, limit))
                running = {frame.f_code.co_name for frame in compat.frames_of(main)}
                # After an exception, Lightning does not call the last function.
                if has_ended or compat.TEARDOWN not in running:
                    patches.restore()
                    return
                if Gatherer.leave_together.__name__ in running:  # it waits for other ranks
                    began = time.monotonic()
            text = Stacks.own()
            frames = dict(threads_in(text)).get(main, [])
            state = _state_of(run, frames, limit)
            entry, files = _entry_of(run, state, [state], limit), HangFiles(0.0, "end")
            path = files.write(run, stacks_file(state.rank), text)
            files.write(run, REPORT, report(entry, [state]))
            self._found(entry)
            _warn(entry, path)

        # The last that Lightning calls.
        patches.wrap_in_context(run.trainer.profiler, "describe", end)  # type: ignore[attr-defined]
        thread = Thread(target=watch, name="lightning_perf end", daemon=True)
        thread.start()

    def _loop(self) -> None:
        sys.setprofile(None)  # as in `Worker`
        try:
            watch = _Watch(
                self._stacks, self._clock, self._after, self._poll, self._stop, self._found
            )
            self._ready.set()
            while not self._stop.wait(self._poll) and (run := self._run()) is not None:
                watch.look(run)
                if self._abort and watch.is_complete:
                    self._aborts = run.ranks.world_size > 1
                    _abort(run, watch, until=partial(self._goes_on, watch, run))
                    self._aborts = False
                del run
            if (run := self._run()) is not None:
                watch.clean(run, FAILED if self._failed else LEFT)
        except Exception as error:  # never a training
            warn(f"hangs are no longer watched for ({describe(error)}).")
        finally:
            self._ready.set()
            self._stacks.close()

    def _goes_on(self, watch: _Watch, run: Run) -> bool:
        """Whether a reported hang has ended, or the run has, unless the other ranks end it."""
        ended_by_others = self._aborts and run.trainer.interrupted
        return (self._stop.is_set() and not ended_by_others) or watch.moved(run)


class _Watch:
    """The checks of a rank's watchdog, and what they remember."""

    def __init__(
        self,
        stacks: Stacks,
        clock: Clock,
        after: float,
        poll: float,
        stop: Event,
        found: Callable[[dict[str, Any]], None],
    ) -> None:
        self._stacks, self._clock, self._after, self._poll = stacks, clock, after, poll
        self._stop, self._found = stop, found
        # Other ranks have three looks to answer.
        self._files = HangFiles(max(3 * poll + 1.0, after / 4))
        #: Whether the present hang was reported, by this rank or another.
        self.reported = False
        self._position: tuple[str, int, object] | None = None
        self._moved = self._looked = time.monotonic()
        # The progress of a Trainer that runs inside of a hook, read once a pause is long.
        self._nested: tuple[object, ...] = ()
        # The stage and the category of the present pause, once it is long.
        self._phase = ("", "")
        # Seconds of the last batches by stage, and the longest pause of each phase.
        self._batches: dict[str, deque[float]] = {}
        self._longest: dict[tuple[str, str], float] = {}
        # This rank's state and stacks while it makes no progress, and when all ranks' are read.
        self._state: RankState | None = None
        self._text, self._decides = "", inf
        # Child processes that have not written their stacks, which py-spy may show later.
        self._silent: list[int] = []
        # How many limits this pause may last: more while other ranks make progress.
        self._patience = 1.0
        # The entry of the present hang, and the states that it is about.
        self._entry: dict[str, Any] | None = None
        self._states: Sequence[RankState] = ()
        # Adds to the stacks after the report of a hang; and whether there was a report.
        self._further: _Further | None = None
        self._keeps = False
        # The reports of earlier hangs of this run, and the stacks that were saved with them.
        self._reports: deque[str] = deque(maxlen=_KEPT)
        self._stacks_saved: deque[str] = deque(maxlen=_KEPT)
        stacks.arm(after)  # the GIL may be held before the first look

    def look(self, run: Run) -> None:
        """Compare with the last look, and report a hang."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > self._after and self._was_frozen(run, gap) and self._entry is None:
            self._moved = now  # what follows is a pause of its own
        pause = now - self._moved
        self._stacks.arm(self._after)
        if self.moved(run) or self._moves_within(pause):
            self._position = self._now(run)
            self._progress(run, now, pause)
            pause = 0.0
        limit = self._after
        asked = run.ranks.world_size > 1 and self._files.is_asked(run)
        if pause > self._after / 2:
            self._phase = run.stage, self._clock.running.category
            frames = self._frames(self._stacks.own())
            limit = self._limit(run, frames)
            # Ranks have limits of their own: one that waits for others does not move.
            if asked and self._describe(run, frames, pause).waits:
                limit = 0.0
            if is_debugged(frames):  # the pause begins when the user goes on
                self._moved, pause = now, 0.0
        if asked:
            self._answer(run, pause, limit)
        too_long = pause > (limit if asked else limit * self._patience)
        # The limit may be that of another phase, which has just begun.
        if self._state is None and too_long and not self.moved(run):
            self._suspect(run, pause)
        if self._decides < inf:
            self._decide(run)
        self._report_again(run, pause)
        self._save_own(run)

    @property
    def is_complete(self) -> bool:
        """Whether the present hang was reported with all that is known of this rank."""
        return self.reported and self._further is None

    def moved(self, run: Run) -> bool:
        """Whether something has ended since the last look, other than by an exception."""
        return self._now(run) != self._position and not run.trainer.interrupted

    def _now(self, run: Run) -> tuple[str, int, object]:
        return run.stage, run.counters.batch, self._clock.latest

    def _moves_within(self, pause: float) -> bool:
        """Whether a hook trains or evaluates with a Trainer of its own, which makes progress."""
        before, self._nested = self._nested, ()
        if pause > self._after / 2:
            self._nested = compat.nested_progress(self._clock.thread or 0)
        return before not in ((), self._nested)

    def _progress(self, run: Run, now: float, pause: float) -> None:
        """Something ended after a pause, which may have been a hang."""
        if any(self._phase):
            self._longest[self._phase] = max(pause, self._longest.get(self._phase, 0.0))
        if self._entry is not None:
            self._went_on(run, pause)
        # The first batch may compile, and start workers.
        if run.counters.batches > 1 and (seconds := run.counters.last_seconds):
            self._batches.setdefault(run.stage, deque(maxlen=_HISTORY)).append(seconds)
        self._moved, self._patience, self._phase = now, 1.0, ("", "")
        self._state, self._decides, self.reported = None, inf, False

    def clean(self, run: Run, how: str) -> None:
        """End the present hang if training went on; without a report, remove what was written.

        ``how`` the training has ended is sent to other ranks.
        """
        if time.monotonic() - self._looked > self._after:  # it could not run until now
            self.look(run)
        # An exception, such as Ctrl-C or a timeout of NCCL, also leaves spans.
        known = 2 if how == FAILED else 3
        if self._entry is not None and self._now(run)[:known] != (self._position or ())[:known]:
            self._went_on(run, time.monotonic() - self._moved)
        self._files.leave(run, how)
        if not self._keeps:
            self._files.remove(run)

    def _limit(self, run: Run, frames: Sequence[Frame]) -> float:
        """Seconds that the present phase may last without a sign of life."""
        stages = run.stages
        slow = (
            not stages.stage  # set-up
            # With compilation, and hooks that are called after ours at its end.
            or stages.counters.batches < 1 + (_position(self._clock) == 0)
            or stages.ended
            or self._phase[1] == "checkpoint"
            or self._is_slow(run)
            or compiles(frames)
        )
        batches = self._batches.get(stages.stage)
        return max(
            self._after * (_LONGER if slow else 1),
            _BATCHES * median_low(batches) if batches else 0.0,
            _BEFORE * self._longest.get(self._phase, 0.0),
        )

    def _is_slow(self, run: Run) -> bool:
        """Whether what runs, or a span around it, may take long."""
        running = self._clock.running
        if running.category == "dataloader_next" and compat.begins_loader(run.trainer):
            return True
        if running.category == "step_lr_schedulers" and run.trainer.is_last_batch:
            return True
        return any(
            each.category == "checkpoint" or each.name in _SLOW or _is_rare(each.name)
            for each in (*self._clock.enclosing, running)
        )

    def _frames(self, text: str) -> list[Frame]:
        """The frames of the training's thread."""
        return dict(threads_in(text)).get(self._clock.thread or 0, [])

    # -- this rank --------------------------------------------------------------------------------

    def _suspect(self, run: Run, pause: float) -> None:
        """This rank makes no progress: write what it does."""
        own = self._stacks.own()
        frames = self._frames(own)
        alone = run.ranks.world_size == 1
        self._state = replace(self._describe(run, frames, pause), complete=False)
        if not alone:
            self._files.ask(run, self._state)
            self._decides = time.monotonic() + self._files.grace
        self._text = f"rank {run.ranks.global_rank}, process {os.getpid()}\n{own}\n"
        workers = tuple(self._workers(run, compat.loader_workers(run.trainer)))
        self._state = replace(self._state, workers=workers, complete=True)
        text = "\n".join([self._text, *self._stacks_saved])
        self._files.write(run, stacks_file(run.ranks.global_rank), text)
        if alone:
            self._report(run, [self._state])
        else:
            self._files.answer(run, self._state)

    def _workers(self, run: Run, roles: Mapping[int, str]) -> Iterator[str]:
        """Add the stacks of all child processes; yields what keeps data loader workers busy.

        Not those of other ranks, which rank 0 may have started.
        """
        until, self._silent = time.monotonic() + _CHILDREN, []
        children = children_of(os.getpid())
        ranks = [pid for pid in run.processes.values() if pid in children]
        theirs = {*ranks, *(pid for rank in ranks for pid in children_of(rank))}
        for pid in children:
            if pid in theirs:
                continue
            if time.monotonic() > until or self._stop.is_set():
                self._text += "further child processes were left out\n"
                return
            dump = dump_of(pid)
            frames = main_thread(dump.text)
            if not dump.text:
                self._silent.append(pid)
            role = roles.get(pid) or ("worker" if is_worker(frames) else "")
            title = f"data loader {role}" if role else "child"
            self._text += f"{title}, process {pid}, {dump.state}\n{dump.text}\n"
            if role and dump.state == "stopped":
                yield f"{role} is stopped"
            elif role and (frame := users_frame(frames)):
                yield f"{role} waits in {frame.place}"

    def _describe(self, run: Run, frames: Sequence[Frame], pause: float, **known: Any) -> RankState:
        action = self._clock.running
        return _state_of(run, frames, pause, category=action.category, name=action.name, **known)

    def _was_frozen(self, run: Run, gap: float) -> bool:
        """Whether no Python ran for too long: C code held the GIL, or the process was stopped.

        Rank 0 reports it.
        """
        late, rank = self._stacks.late(), run.ranks.global_rank
        text = late or self._stacks.own()
        frames, pause = self._frames(text), self._looked - self._moved
        if gap <= self._limit(run, frames):
            return False
        if rank or self._entry is not None:
            return True
        self._stacks_saved.appendleft(text)
        self._save_stacks(run)
        idle = time.perf_counter() - self._clock.latest
        state = replace(self._describe(run, frames, pause), missing=_FROZEN)
        if idle < pause / 2:  # it has gone on already, by some milliseconds
            ended = run.counters.last_seconds > pause / 2
            place = state.place if late else ""
            state = replace(state, batch=state.batch - ended, category="", name="", place=place)
        self._files.receive(run)
        began = self._files.time_of(run, stacks_file(rank)) - pause * 1e9
        if not self._files.is_reported_since(run, began, self._looked):
            self._report(run, [state])
            self._went_on(run, pause)
            self.reported = False
            return True
        # Another rank has reported it meanwhile; the summary is written by this one.
        self._found(_entry_of(run, state, [state], pause) | {"ended": _clock_time(0.0)})
        with suppress(Exception):
            run.refresh_summary()
        return True

    # -- all ranks --------------------------------------------------------------------------------

    def _answer(self, run: Run, pause: float, limit: float) -> None:
        """Send this rank's state to a rank that has requested it: up to its limit, it moves."""
        if self._state is not None:
            self._state = replace(self._state, seconds=pause)
            self._files.answer(run, self._state)
        elif pause <= limit:  # otherwise its state follows
            self._files.answer(run, self._describe(run, (), pause, moves=True))

    def _decide(self, run: Run) -> None:
        """Report if no rank makes progress; the first rank that has none does it."""
        own, late = run.ranks.global_rank, time.monotonic() >= self._decides
        assert self._state is not None  # the caller's condition
        found = [self._files.state_of(run, rank) for rank in range(run.ranks.world_size)]
        found[own] = self._state
        if any(its is not None and not its.moves for its in found[:own]):
            self.reported = self._files.is_reported(run)
            return
        if not late and not all(each and each.complete and not each.moves for each in found):
            return
        self._decides, states, unknown = inf, list[RankState](), False
        for rank, state in enumerate(found):
            states.append(state or self._files.missing(run, rank))
            unknown |= state is None and states[-1].moves
        pause = time.monotonic() - self._moved
        if any(e.moves for e in found if e) or (unknown and pause < _LONGER * self._after):
            # A higher rank with a shorter limit asks again before this one.
            self._files.answer(run, replace(self._state, moves=True))
            self._patience, self._state = self._patience + 1, None
            return
        self._report(run, states)

    def unready(self, run: Run) -> Iterator[int]:
        """Send that this rank is ready to be aborted; yields a rank until all that answer are.

        If another rank has ended, an exception of this one says so.
        """
        assert self._state is not None  # it is reported
        self._files.answer(run, replace(self._state, aborts=True), reported=True)
        for rank in {*range(run.ranks.world_size)} - {self._state.rank}:
            while not run.trainer.interrupted:
                self._files.receive(run)
                state = self._files.state_of(run, rank)
                if state is None or state.aborts:
                    break
                yield rank

    def silent(self, run: Run, among: Collection[int]) -> Iterator[int]:
        """Those of these processes that are ranks in training and have not answered."""
        return self._files.silent(run, among)

    # -- the report -------------------------------------------------------------------------------

    def _report(self, run: Run, states: Sequence[RankState]) -> None:
        """Report the hang, whose entry in the summary ends when training goes on."""
        own = next(each for each in states if each.rank == run.ranks.global_rank)
        self._entry = _entry_of(run, own, states, time.monotonic() - self._moved)
        self._states, self.reported = states, True
        self._found(self._entry)
        path = self._publish(run)
        if self._state is not None and len(states) > 1:
            self._files.answer(run, self._state, reported=True)
        _warn(self._entry, path)

    def _publish(self, run: Run) -> Path | None:
        """Write the report, with those of earlier hangs after it, the summary and the page."""
        assert self._entry is not None  # the callers' condition
        text = report(self._entry, self._states)
        path = self._files.save(run, REPORT, "\n---\n\n".join([text, *self._reports]))
        if "ended" in self._entry:
            self._reports.appendleft(text)
        with suppress(Exception):  # the report has it
            run.refresh_summary()
            # Rank 0 cannot, and may be ended without running Python again.
            if self._states[0].missing not in ("", LEFT, FAILED) and "ended" not in self._entry:
                add_hang(run, self._entry)
        return path

    def _report_again(self, run: Run, pause: float) -> None:
        """Write the report again if the hang has lasted much longer since."""
        if self._entry is not None and pause > _GROWS * self._entry["seconds"]:
            self._lasts(run, pause)
            self._publish(run)

    def _lasts(self, run: Run, pause: float) -> None:
        """The hang that was reported has lasted longer since."""
        assert self._entry is not None  # the callers' condition
        longer = pause - self._entry["seconds"]
        self._states = [
            replace(each, seconds=each.seconds + longer) if each.seconds else each
            for each in self._states
        ]
        text = sentence(self._states, run.ranks.world_size)
        self._entry |= {"seconds": round(pause, 1), "text": text}

    def _save_own(self, run: Run) -> None:
        """Save the stacks of this rank after a report, and again with what `_Further` adds."""
        if self.reported and self._text:
            self._further = _Further(run, self._text, self._silent, self._stop)
            self._further.start()
            self._stacks_saved.appendleft(self._text)
            self._save_stacks(run)
            self._text, self._keeps = "", True
        if self._further is not None and not self._further.is_alive():
            self._stacks_saved[0] = self._further.text
            self._save_stacks(run)
            self._further = None

    def _save_stacks(self, run: Run) -> None:
        """Save the stacks of this rank, the latest first."""
        self._files.save(run, stacks_file(run.ranks.global_rank), "\n".join(self._stacks_saved))

    def _went_on(self, run: Run, pause: float) -> None:
        assert self._entry is not None  # the caller's condition
        self._lasts(run, pause)
        if not (hangs := run.windows.gatherer.leads):
            self._entry["ended"] = _clock_time(0.0)
        self._publish(run)
        self._entry = None
        if hangs:  # only this rank went on, to its end
            return
        compat.rank_zero_info(
            f"lightning_perf: training goes on after it stood for {pause:,.0f} s."
        )


def _state_of(run: Run, frames: Sequence[Frame], pause: float, **known: Any) -> RankState:
    """The state of this rank, from the frames of the training thread."""
    frame, training = users_frame(frames), run.progress.stages["train"]
    position = _position(run.require_times().clock)
    ends = training.epoch_ends or (position == 0 and run.trainer.should_stop)
    return RankState(
        run.ranks.global_rank,
        stage=run.stage,
        batch=run.counters.batch,
        trained=training.batch,
        epochs=training.epoch + ends,
        position=position,
        seconds=pause,
        place="" if frame is None else frame.place,
        collective=collective_in(frames),
        host=platform.node(),
        pid=os.getpid(),
        **known,
    )


def _position(clock: Clock) -> int:
    """How far training has come since the end of its last batch: 0 until the next one begins.

    `START` is 1, and the phases follow in their order.
    """
    for action in (clock.running, *reversed(clock.enclosing)):
        if action.name == START:
            return 1
        if action.category in PHASES:
            return 2 + PHASES.index(action.category)
        if action.name.endswith("_batch_start"):  # called once the batch is on its device
            return 2 + PHASES.index("to_device")
    return 0


def _entry_of(
    run: Run, own: RankState, states: Sequence[RankState], pause: float
) -> dict[str, Any]:
    """A hang as the summary has it."""
    found = culprits(states)
    known = next((each for each in found if not each.missing), own)
    return {
        "began": _clock_time(pause),
        "seconds": round(pause, 1),
        "stage": known.stage,
        "batch": known.batch,
        "ranks": [each.rank for each in found],
        "phase": found[0].category,
        "text": sentence(states, run.ranks.world_size),
    }


def _warn(hang: Mapping[str, Any], path: Path | None) -> None:
    text = f"the training hangs: {hang['text']}"
    warn(f"{text}. The stacks of all ranks are in {path.parent}." if path else f"{text}.")


class _Further(Thread):
    """Adds what is known of this rank besides its stacks: of C code, its GPUs, and collectives.

    py-spy may take long, or not end, and the watch waits for neither.
    """

    def __init__(self, run: Run, text: str, silent: Sequence[int], stop: Event) -> None:
        super().__init__(name="lightning_perf stacks", daemon=True)
        sampler = vars(run).get("sampler")  # not made here: that would call CUDA
        latest = {} if sampler is None else sampler.latest
        self._gpus = "\n".join(f"{k}: {v:g}" for k, v in latest.items() if k.startswith("gpu_"))
        self._pids, self._stop_all = (os.getpid(), *silent), stop
        #: All of it, once this has ended.
        self.text = text

    @override
    def run(self) -> None:
        until, natives = time.monotonic() + _CHILDREN, list[str]()
        for pid in self._pids:
            if time.monotonic() < until:
                natives.append(native_stacks(pid, self._stop_all))
        self.text += "\n".join(filter(None, (*natives, self._gpus, compat.flight_recorder())))


def _clock_time(ago: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - ago))  # noqa: TID251


def _is_rare(name: str) -> bool:
    """Whether an action is a hook that is not called per batch, such as ``on_train_epoch_end``."""
    hook = name.rpartition(".")[2]
    return hook.startswith("on_") and "batch" not in hook and hook not in PER_BATCH


def _abort(run: Run, watch: _Watch, until: Callable[[], bool]) -> None:
    """End the process so that a scheduler restarts it, unless the training goes on meanwhile.

    Also end ranks that do not answer and have started this one, or were started by it, as those of
    Lightning's launcher: nothing else would end them.
    """
    warn(f"the training is aborted (exit code {ABORTED}), as Hang(action='abort') says.")
    for worker in (run.file_worker, run.worker):
        done = Event()
        # After what is due now.
        if worker.submit(done.set, "the abort"):
            wait_until(lambda: done.is_set() or until(), _FLUSH, _SHORT)  # noqa: B023
    agreed, unready = False, watch.unready(run)
    if run.ranks.world_size > 1 and not until():
        wait_until(lambda: next(unready, None) is None or until(), _RANKS, _SHORT)
        # Once more: the end of a rank, whose error Lightning may ignore, looks like progress.
        agreed = next(unready, None) is None
    if not agreed and until():
        warn("the training goes on, and is not aborted.")
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    daemons, silent = list[Any](), list[int]()
    with suppress(Exception):
        own = children_of(os.getpid())  # a process that was forked knows those of its parent
        daemons += (each for each in active_children() if each.daemon and each.pid in own)
        silent += watch.silent(run, (os.getppid(), *own))
    with suppress(Exception):
        _hold_gil(run, silent)
    for child in daemons:  # as Python's own end does: data loader workers
        with suppress(Exception):
            child.kill()
    os._exit(ABORTED)


def _hold_gil(run: Run, silent: Sequence[int]) -> None:
    """Let no other thread run Python until the other ranks have done the same, or have ended.

    The end of one, also of a silent one that is killed here, is an exception in the others, which
    would handle it. Lightning kills the process that has started the others once one of these has
    ended, so that it would not end with our code: the others wait for its end.
    """
    parent, usleep = os.getppid(), PyDLL(None).usleep  # which keeps the GIL

    def hold(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and os.getppid() == parent:
            usleep(10_000)

    sys.setswitchinterval(2 * _RANKS)  # seconds before another thread requests the GIL
    hold(0 if run.ranks.world_size == 1 else _TOGETHER)
    for pid in silent:
        with suppress(OSError):  # it has ended
            os.kill(pid, signal.SIGKILL)
    hold(_RANKS if parent in run.processes.values() else 0)
