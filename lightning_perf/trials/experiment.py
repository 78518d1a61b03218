"""Runs a training many times, some batches each, with and without changes, and compares the speed.

The order within a round is drawn: neither a machine that becomes slower nor other work that comes
back at regular times favours a change.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from itertools import pairwise
from math import ceil, floor, inf, lcm, log, sqrt
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.files import walked
from lightning_perf.trials.process import Outcome, run_trial
from lightning_perf.trials.proof import FEWEST, LOOKS, Speedup, same_training, speedup
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Trials as it is that are so many times as fast as the first run read from a cache.
_CACHED = 1.5
#: After two rounds below this ratio a change is measured no more.
_HOPELESS = 0.9
#: Batches before those that are timed, and limits of the number of those.
_WARM_UP, _BATCHES = 10, (10, 5000)
#: The shares of the time for the first run, and for changes alone, before they are combined.
_FIRST, _ALONE = 0.25, 0.6
#: A trial may take so many times as long as the first run, and so many seconds more; and so many
#: seconds after the time for all trials.
_SLOWER, _GRACE, _AFTER = 4.0, 60.0, 10.0
#: The share of this time after which a trial ends itself that has no end yet.
_MOST = 0.75
#: What a training does besides, in the first run.
_ALL = ("checkpoint", "validation")
#: Seeds of further runs as it is, which show by how much losses differ by chance.
_SEEDS = (1, 2)
#: Levels and files of the working folder in which files that the script writes are searched.
_LEVELS, _MOST_FILES = 6, 50_000
#: Folders that have none of them.
_APART = (".git", "__pycache__", "node_modules")


class TrialsFailed(Exception):
    """There is nothing to compare; the message says why."""


class Candidate(NamedTuple):
    """A change as a trial has described it; the fields are those of `changes.Change`."""

    kind: str
    value: Any
    name: str
    group: str
    exact: bool
    keeps: list[str]
    predicted: float | None
    period: float | None
    trainer: dict[str, Any]
    loader: dict[str, Any]
    code: str
    #: Paths in LightningCLI's configuration, with values.
    yaml: list[list[Any]]


class Setting(NamedTuple):
    """What is run: changes, what trials do besides training, and the seed."""

    changes: tuple[Candidate, ...] = ()
    keeps: tuple[str, ...] = ()
    seed: int = 0

    @property
    def name(self) -> str:
        """The changes in few words."""
        return " + ".join(each.name for each in self.changes) or "as it is"

    @property
    def groups(self) -> set[str]:
        """The groups of the changes."""
        return {each.group for each in self.changes}


class Row(NamedTuple):
    """What was found out about a setting, compared with the training as it is."""

    setting: Setting
    #: Of the training with its validation and checkpoints; None if it was not measured.
    speedup: Speedup | None = None
    #: As `same_training` says.
    same: str = "unknown"
    #: Why it was not measured; None if there was no time.
    failure: str | None = None
    #: Bytes, before and after.
    memory: tuple[int, ...] = ()
    #: Seconds that the start takes longer.
    startup: float = 0.0
    #: The speed-up of its trials, which may leave validation and checkpoints out.
    in_trials: Speedup | None = None

    @property
    def predicted(self) -> float | None:
        """The speed-up that the diagnosis promises for a change alone."""
        return self.setting.changes[0].predicted if len(self.setting.changes) == 1 else None

    @property
    def better(self) -> bool:
        """Whether it is certainly faster."""
        return self.speedup is not None and self.speedup.better

    @property
    def undecided(self) -> bool:
        """Whether it seems faster, after too few rounds to be certain."""
        found = self.speedup
        return found is not None and found.ratio > 1 and found.rounds < FEWEST

    @property
    def helps(self) -> bool:
        """Whether it is worth writing down: certainly faster, and harmless."""
        return self.better and self.same.startswith(("equal", "alike"))

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        own: dict[str, Any] = {"setting": self.setting.name}
        for name in ("speedup", "in_trials"):
            found: Speedup | None = getattr(self, name)
            measured = None if found is None else found._asdict()
            if measured and measured["high"] == inf:
                measured = {"ratio": measured["ratio"], "rounds": measured["rounds"]}
            own[name] = measured
        return self._asdict() | own | {"predicted": self.predicted, "helps": self.helps}


class Experiment:
    """Trials of a command.

    Args:
        command: The program and its arguments.
        minutes: The time for all trials.
        seconds: Of timed batches per trial.
        only: Groups of changes; empty for all.
        tell: Receives a line about each trial.
    """

    def __init__(
        self,
        command: Sequence[str],
        minutes: float,
        seconds: float,
        only: Sequence[str],
        tell: Callable[[str], object],
    ) -> None:
        self.command, self.only, self.tell = list(command), list(only), tell
        self._seconds, self._end = seconds, monotonic() + 60 * minutes
        self._shared = Path(tempfile.mkdtemp(prefix="lp-"))  # short: sockets are below it
        (self._shared / "tmp").mkdir()
        #: Batches of a trial; None for the first run. Seconds until one is ended.
        self.batches: int | None = None
        # By what trials do besides training: they have multiples of so many batches.
        self._periods: dict[str, int] = {}
        # Whether trials do all that the first run does, and whether that one ended by itself.
        self._whole = self._ends = False
        self.allowed = 60 * minutes * _FIRST + _GRACE
        #: Trials so far, and rounds.
        self.count = self._round = 0
        self._order = np.random.default_rng(4)
        # The outcome of each trial, with its round; and the one that the end of the time ended.
        self._outcomes: list[tuple[int, Setting, Outcome]] = []
        self._ended: tuple[Setting, str] | None = None
        self.first: Outcome
        #: Files that the command wrote by itself.
        self.written: list[str] = []
        #: Changes for which there was no time.
        self.not_tried: list[Candidate] = []
        #: Changes whose period is longer than a trial can be.
        self.too_long: list[Candidate] = []

    def close(self) -> None:
        """Delete what trials have written."""
        shutil.rmtree(self._shared, ignore_errors=True)

    def results(self) -> tuple[list[Row], Row | None]:
        """Try all; returns the changes alone, and the best set of them.

        Raises:
            TrialsFailed: The training itself does not run.
        """
        settings = [Setting((each,), tuple(each.keeps)) for each in self.start()]
        # What can be combined needs some time afterwards, and so do runs of other seeds.
        share = _ALONE if len({group for each in settings for group in each.groups}) > 1 else 1.0
        exact = all(change.exact for each in settings for change in each.changes)
        drawn = self.first.result["drawn"]
        if {*drawn["batch"]} & {*drawn["validation"]}:
            exact &= not any("validation" in each.keeps for each in settings)
        seeds = 0 if exact and self.first.result["dataset"] == "fixed" else len(_SEEDS)
        last = self._end - seeds * self.first.wall_seconds
        left = last - monotonic()
        tried: list[Setting] = []
        # All the time if there is nothing to combine, nor to compare with other seeds.
        for end in (monotonic() + share * left, last, self._end):
            most = int((end - monotonic()) / (FEWEST * max(self.first.wall_seconds, 1e-3)))
            # As many at once as there is time for; then others, if these were settled.
            while len(tried) < len(settings) and monotonic() + self.first.wall_seconds < end:
                some = settings[len(tried) :][: max(most - 1, 1)]
                self._race(Setting(), some, end)
                tried += some
            self._race(Setting(), tried, end)
            if any(row.better for row in map(self._row, tried)):
                break
        self.not_tried = [change for each in settings[len(tried) :] for change in each.changes]
        rows = self._rows(tried)
        return rows, self._combined(_helping(rows))

    def so_far(self) -> tuple[list[Row], Row | None]:
        """As `results`, of the trials before an interrupt alone."""
        settings: list[Setting] = []
        for _, one, _ in self._outcomes:
            if one.changes and one not in settings:
                settings.append(one)
        rows = [self._row(each) for each in settings]
        alone = [row for row in rows if len(row.setting.changes) == 1]
        return alone, next(iter(_helping(rows)), None)

    def start(self) -> list[Candidate]:
        """Run the training as it is, with a diagnosis; returns what to try.

        Raises:
            TrialsFailed: It fails, or is too short.
        """
        before = _files(Path())
        self.first = self.run(Setting(keeps=_ALL))
        self.written = sorted(name for name, _ in _files(Path()) - before)
        if self.first.error is not None:
            why = ": raise --minutes, unless it hangs" if self.first.late else ""
            raise TrialsFailed(f"the training fails before any change: {self.first.error}{why}")
        result, (least, most) = self.first.result, _BATCHES
        timed, epoch = result["timed"], result.get("epoch")
        if timed < least and result["seconds"] > self._seconds:
            slow = f"a batch takes {duration(self.first.per_batch)}, and a trial needs"
            raise TrialsFailed(f"{slow} {_WARM_UP + least} of them: raise --minutes")
        if timed < least:
            raise TrialsFailed(
                f"the first Trainer.fit ended after {result['done']} of the {_WARM_UP + least} "
                "batches that trials need: raise max_epochs, max_steps, max_time or "
                "limit_train_batches, without fast_dev_run"
            )
        candidates = [Candidate(**each) for each in result["candidates"]]
        batches = min(max(ceil(self._seconds / result["median"]), least), most)
        # Workers deliver as many batches at once as there are workers, and load some ahead.
        usual = {"num_workers": result["workers"], "prefetch_factor": result["prefetch"]}
        loaders = [usual, *(usual | each.loader for each in candidates)]
        whole = lcm(*(each["num_workers"] or 1 for each in loaders))
        ahead = max((each["prefetch_factor"] or 2) * each["num_workers"] for each in loaders)
        whole = epoch if epoch and epoch <= batches else whole
        batches = ceil(batches / whole) * whole
        self._ends = result["seconds"] < self._seconds
        if self._ends:
            left = max(result["done"] - max(ahead, _WARM_UP), least)
            batches = min(batches, left // whole * whole or left)
        self.batches = batches
        self.allowed = _SLOWER * self.first.wall_seconds + _GRACE
        left = (self._end - monotonic()) / (2 * FEWEST)
        longest = timed if self._ends else max(left / self.first.per_batch, 1)
        self.too_long = [each for each in candidates if (each.period or 1) > longest]
        candidates = [each for each in candidates if each not in self.too_long]
        self._periods = {
            name: lcm(*(ceil(each.period or 1) for each in candidates if name in each.keeps))
            for name in _ALL
        }
        return candidates

    def run(self, setting: Setting) -> Outcome:
        """Run one trial."""
        self.count += 1
        longest = max((self._end - monotonic()) * _FIRST, 2 * self._seconds)
        limit = min(self.allowed, max(self._end - monotonic(), 0.0) + _AFTER)
        period = lcm(*(self._periods.get(name, 1) for name in setting.keeps))
        rounded = floor if self._ends else ceil
        batches = self.batches and max(rounded(self.batches / period), 1) * period
        spec = {
            "changes": [[each.kind, each.value] for each in setting.changes],
            "keeps": _ALL if self._whole else setting.keeps, "warm_up": _WARM_UP,
            "batches": batches, "seconds": self._seconds,
            "most_seconds": _MOST * limit if batches else longest,
            "seed": setting.seed, "only": self.only,
        }  # fmt: skip
        folder = self._shared / str(self.count)
        outcome = run_trial(self.command, self._shared, folder, spec, limit)
        if batches and outcome.result and not outcome.result["timed"]:
            why = f"the training ended after {outcome.result['done']} batches"
            return outcome._replace(result={}, error=why)
        return outcome

    # -- rounds -----------------------------------------------------------------------------------

    def _race(
        self, reference: Setting, settings: Sequence[Setting], until: float, *also: Setting
    ) -> None:
        """Measure settings beside a reference, until all are settled or the time is up."""
        while True:
            left = [each for each in settings if not self._is_settled(each, reference)]
            if not left:
                return
            kept = {each.keeps for each in left}
            order = [*(reference._replace(keeps=keeps) for keeps in sorted(kept)), *also, *left]
            self._round += 1
            for place in self._order.permutation(len(order)):
                if monotonic() + self.first.wall_seconds > until:
                    return
                self._measure(order[place])

    def _measure(self, setting: Setting) -> None:
        outcome = self.run(setting)
        # It may be no failure, if there is no time for another trial.
        if outcome.late and monotonic() + self.first.wall_seconds > self._end:
            self._ended = setting, f"{outcome.error}, at the end of --minutes"
            return
        if outcome.error and not (
            setting.changes or self._whole or outcome.late or self._of(setting)
        ):
            # It may need what trials leave out, such as a metric of validation.
            self._whole = True
            self._outcomes.clear()  # they have done less
            self.tell(f"trial {self.count}: {setting.name}: {outcome.error}: all is kept from now")
            outcome = self.run(setting)
        self._outcomes.append((self._round, setting, outcome))
        text = outcome.error or f"{duration(outcome.per_batch)} per batch"
        self.tell(f"trial {self.count}: {setting.name}: {text}")

    def _is_settled(self, setting: Setting, reference: Setting) -> bool:
        """Whether a comparison has its answer."""
        logs = self._logs(setting, reference)
        if self._failure(setting) or (len(logs) > 1 and max(logs) < log(_HOPELESS)):
            return True
        found = self._speedup(setting, reference)
        if found is None or found.rounds not in LOOKS:
            return False
        return found.settled or found.rounds == LOOKS[-1]

    def _combined(self, helping: Sequence[Row]) -> Row | None:
        """Add one change after the other to the best one, if the sum is faster."""
        best = helping[0] if helping else None
        for row in helping[1:]:
            assert best is not None  # the first one
            if row.setting.groups & best.setting.groups:
                continue
            keeps = tuple(sorted({*best.setting.keeps, *row.setting.keeps}))
            both = Setting((*best.setting.changes, *row.setting.changes), keeps)
            # As it is in each round, too: the sum is measured, not multiplied.
            self._race(best.setting, [both], self._end, Setting(keeps=keeps))
            added = self._speedup(both, best.setting)
            (found,) = self._rows([both])
            if added is not None and added.better and found.helps:
                best = found
        return best

    # -- results ----------------------------------------------------------------------------------

    def _of(self, setting: Setting) -> dict[int, Outcome]:
        """The outcomes of a setting that have not failed, by round."""
        return {n: each for n, one, each in self._outcomes if one == setting and not each.error}

    def _failure(self, setting: Setting) -> str | None:
        """Why a setting has failed, for which one failure is enough, or says nothing."""
        errors = (each.error for _, one, each in self._outcomes if one == setting)
        base = setting._replace(changes=(), seed=0)
        return next(filter(None, errors), self._cache(base) if setting != base else None)

    def _cache(self, base: Setting) -> str | None:
        """Why times say nothing about a training whose samples are new: all trials read the same.

        A cache outside of the process, such as that of the file system, has those of earlier ones.
        """
        found = [each.per_batch for each in self._of(base).values()]
        before = self.first.per_batch * (1 - self._left_out(base))
        if len(found) < FEWEST or before < _CACHED * np.median(found):
            return None
        first, now = duration(before), duration(float(np.median(found)))
        why = "samples come from a cache, or times vary too much"
        return f"{why}: as it is, a batch took {first} in the first run, and {now} in trials"

    def _logs(self, setting: Setting, reference: Setting) -> list[float]:
        """The logarithm of the ratio of both times in each round that has both."""
        ours, theirs = self._of(setting), self._of(reference._replace(keeps=setting.keeps))
        common = sorted(ours.keys() & theirs.keys())
        return [log(theirs[n].per_sample / ours[n].per_sample) for n in common]

    def _left_out(self, setting: Setting) -> float:
        """The share of the first run's time for what trials of a setting do not do."""
        result, kept = self.first.result, _ALL if self._whole else setting.keeps
        seconds = (value for name, value in result["besides"].items() if name not in kept)
        return float(sum(seconds) / result["seconds"])

    def _speedup(self, setting: Setting, reference: Setting) -> Speedup | None:
        """How many times as fast a training is as the reference; None if that is unknown.

        What trials leave out takes the same time with and without the changes.
        """
        share, found = self._left_out(setting), self._in_trials(setting, reference)
        if reference.changes and (known := self._speedup(reference, Setting())):
            share *= known.ratio  # of less time
        return found and found.with_rest(share)

    def _in_trials(self, setting: Setting, reference: Setting) -> Speedup | None:
        """How many times as fast trials of a setting are."""
        logs = self._logs(setting, reference)
        if not logs:
            return None
        # Between neighbouring rounds, as it is. Not a bootstrap of the batches of a trial: several
        # workers deliver them in bursts, which are no noise.
        usual = [
            log(one.per_sample / other.per_sample) ** 2
            for one, other in pairwise(self._of(Setting(keeps=setting.keeps)).values())
        ]
        return speedup(logs, sqrt(np.mean(usual)) if usual else 0.0)

    def _rows(self, settings: Sequence[Setting]) -> list[Row]:
        """The rows of settings; what may be alike is compared with runs of other seeds."""
        rows = [self._row(each) for each in settings]
        if any(row.better and row.same.startswith("unknown (") for row in rows):
            for seed in _SEEDS:
                in_time = monotonic() + self.first.wall_seconds <= self._end
                if in_time and not self._of(Setting(seed=seed)):
                    self._measure(Setting(seed=seed))
            rows = [self._row(each) for each in settings]
        return rows

    def _row(self, setting: Setting) -> Row:
        ours = list(self._of(setting).values())
        theirs = list(self._of(Setting(keeps=setting.keeps)).values())
        failure = self._failure(setting)
        if failure is None and self._ended and self._ended[0] == setting and not ours:
            failure = self._ended[1]
        if not theirs and (also := self._failure(Setting(keeps=setting.keeps))):
            failure = f"as it is fails, too, in a trial: {also}"
        if failure or not (ours and theirs):
            return Row(setting, failure=failure)
        starts = [np.mean([x.result["startup"] or 0.0 for x in some]) for some in (theirs, ours)]
        seeded = [x.result for seed in _SEEDS for x in self._of(Setting(seed=seed)).values()]
        same = same_training(
            ours[0].result, [x.result for x in theirs], seeded,
            all(each.exact for each in setting.changes),
            str(self.first.result.get("dataset")) if any(x.loader for x in setting.changes) else "",
            self.first.result,
        )  # fmt: skip
        return Row(
            setting, self._speedup(setting, Setting()), same, None,
            tuple(max(x.memory for x in some) for some in (theirs, ours)),
            float(starts[1] - starts[0]), self._in_trials(setting, Setting()),
        )  # fmt: skip


def _helping(rows: Sequence[Row]) -> list[Row]:
    """The rows that are worth writing down, the fastest first."""
    found = [(row.speedup.ratio, row) for row in rows if row.speedup and row.helps]
    return [row for _, row in sorted(found, key=itemgetter(0), reverse=True)]


def _files(folder: Path) -> set[tuple[str, tuple[int, int]]]:
    """The files below a folder, of the first levels, with their sizes and times."""
    found: set[tuple[str, tuple[int, int]]] = set()
    for path, names in walked(folder, _LEVELS, lambda name: name not in _APART):
        for name in names:
            with suppress(OSError):
                stat = (path / name).lstat()
                found.add((str(path / name), (stat.st_size, stat.st_mtime_ns)))
        if len(found) > _MOST_FILES:
            break
    return found
