"""Runs a training many times, some batches each, with and without changes, and compares the speed.

Each trial is a process of its own (`lightning_perf.trials.trial`). Rounds alternate in their order,
so that a machine that becomes slower favours no change.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import chain, combinations, pairwise
from math import ceil, exp, inf, log, sqrt
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from lightning_perf.diagnosis.stats import resampled_ratios
from lightning_perf.errors import printable
from lightning_perf.files import read_bytes, read_json, walked, write_text
from lightning_perf.tracking.summary import text_of
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Rounds of a comparison. It is looked at after each one from the first number on.
_FEWEST, MOST = 3, 7
#: Student's quantile of 0.995, by degrees of freedom. Five looks at intervals of 99 % are together
#: wrong at most as often as one look at 95 %.
_STUDENT = {2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707}
#: A smaller gain is not worth a change.
LEAST = 0.02
#: After two rounds below this ratio a change is measured no more.
_HOPELESS = 0.9
#: Batches of a trial that are timed, and the shares of the time for the first run and for changes
#: alone, before they are combined.
_BATCHES = (10, 5000)
_FIRST, _ALONE = 0.25, 0.6
#: A trial may take so many times as long as the first run, and so many seconds more.
_SLOWER, _GRACE = 4.0, 60.0
#: Seconds between looks at a process, and for a launcher to end after its ranks.
_PAUSE, _LAUNCHER = 0.2, 5.0
#: Seeds of further baselines, which show by how much losses differ by chance.
_SEEDS = (1, 2)
#: Levels and files of the working folder in which files that the script writes are searched.
_LEVELS, _MOST_FILES = 6, 50_000
#: What is never the script's own output.
_HIDDEN = (".git", "__pycache__", "node_modules")
#: Lines of the output that explain a failure.
_LAST_BYTES = 4000


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
    def key(self) -> str:
        """The same for equal settings."""
        return repr((sorted((each.kind, repr(each.value)) for each in self.changes), *self[1:]))

    @property
    def name(self) -> str:
        """The changes in few words."""
        return " + ".join(each.name for each in self.changes) or "as it is"


class Outcome(NamedTuple):
    """What a trial gave."""

    #: As written by the trial; empty if it failed.
    result: Mapping[str, Any]
    #: Why it failed.
    error: str | None
    wall_seconds: float
    #: The most memory that its processes had, in bytes.
    host_memory: int

    @property
    def per_batch(self) -> float:
        """Seconds per batch."""
        return float(sum(self.result["seconds"]) / max(sum(self.result["counts"]), 1))

    @property
    def per_sample(self) -> float:
        """Seconds per sample, or per batch if the samples are unknown."""
        return self.per_batch / (self.result.get("batch_size") or 1)

    @property
    def noise(self) -> float:
        """The standard deviation of the logarithm of the time, by a block bootstrap."""
        seconds, counts = (np.array(self.result[name], float) for name in ("seconds", "counts"))
        resampled = resampled_ratios(seconds, counts, 200, seed=0) if len(seconds) > 2 else None
        return 0.0 if resampled is None else float(np.log(np.maximum(resampled, 1e-12)).std())


class Speedup(NamedTuple):
    """How many times as fast a setting is as another one, with a 95 % interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def better(self) -> bool:
        """Whether it is certainly faster, by enough."""
        return self.low > 1 + LEAST

    @property
    def settled(self) -> bool:
        """Whether further rounds would not change the answer."""
        return self.better or self.high < 1 + LEAST


def speedup(logs: Sequence[float], noise: float) -> Speedup:
    """The speed-up from logarithms of ratios, one per round.

    Args:
        logs: Of at least one round.
        noise: The least standard deviation: few rounds may agree by chance.

    Example:
        >>> found = speedup([0.69, 0.70, 0.69], noise=0.01)
        >>> f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"
        '2.00 (1.89 to 2.12)'
    """
    mean, count = float(np.mean(logs)), len(logs)
    if count < _FEWEST:
        return Speedup(exp(mean), 0.0, inf, count)
    spread = max(float(np.std(logs, ddof=1)), noise)
    half = _STUDENT[min(count - 1, max(_STUDENT))] * spread / sqrt(count)
    return Speedup(exp(mean), exp(mean - half), exp(mean + half), count)


class Row(NamedTuple):
    """What was found out about a setting."""

    setting: Setting
    predicted: float | None
    #: None if it was not measured.
    speedup: Speedup | None
    #: Whether the training is the same; as `same_training` says.
    same: str
    #: Why there is no speed-up.
    failure: str | None
    #: Bytes, before and after.
    memory: tuple[int, int] | None
    #: Seconds that the start takes longer.
    startup: float

    @property
    def helps(self) -> bool:
        """Whether the change is worth writing down: faster for certain, and harmless."""
        better = self.speedup is not None and self.speedup.better
        return better and self.same.startswith(("equal", "alike"))

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        found = None if self.speedup is None else self.speedup._asdict()
        if found and self.speedup and self.speedup.high == inf:
            del found["low"], found["high"]
        return {
            **self._asdict(), "setting": self.setting.name, "speedup": found, "helps": self.helps,
        }  # fmt: skip


class Experiment:
    """Trials of a command.

    Args:
        command: The program and its arguments.
        minutes: The time for all trials.
        seconds: Of timed batches per trial.
        only: Groups of changes; empty for all.
        tell: Receives a line about each step.
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
        self._seconds, self._began = seconds, monotonic()
        self._limit = self._began + 60 * minutes
        self._shared = Path(tempfile.mkdtemp(prefix="lp-"))  # short: sockets are below it
        (self._shared / "tmp").mkdir()
        #: Trials so far.
        self.count = 0
        self.batches: int | None = None
        self._warm_up = 10
        self.allowed = 60 * minutes * _FIRST + _GRACE
        #: All outcomes of each setting by its key, by round.
        self.outcomes: dict[str, dict[int, Outcome]] = {}
        self._round = 0
        self.first: Outcome
        #: Files that the command wrote by itself.
        self.written: list[str] = []
        self.not_tried: list[Candidate] = []

    def close(self) -> None:
        """Delete what trials have written."""
        shutil.rmtree(self._shared, ignore_errors=True)

    @property
    def seconds_left(self) -> float:
        """Of the time that was given."""
        return self._limit - monotonic()

    # -- processes --------------------------------------------------------------------------------

    def run(self, setting: Setting) -> Outcome:
        """Run one trial."""
        self.count += 1
        folder = self._shared / str(self.count)
        folder.mkdir()
        spec = {
            "folder": str(folder), "shared": str(self._shared), "keeps": setting.keeps,
            "changes": [[each.kind, each.value] for each in setting.changes],
            "warm_up": self._warm_up, "batches": self.batches, "seconds": self._seconds,
            "most_seconds": max(self.seconds_left * _FIRST, 2 * self._seconds),
            "seed": setting.seed, "only": self.only,
        }  # fmt: skip
        write_text(folder / "spec.json", text_of(spec))
        output, began = folder / "output.txt", monotonic()
        with output.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603  no shell
                self.command,
                env=self._environment(folder / "spec.json"),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                hung, memory = self._wait(process, folder / "result.json")
            finally:
                stop(process)
        wall = monotonic() - began
        result, error = _result_in(folder / "result.json")
        if error is None and not result:
            error = f"stopped after {duration(wall)} without a result" if hung else _last(output)
            if not hung and process.returncode == 0:
                error = (
                    "the command ended without Trainer.fit, or its Trainer is in a process that "
                    f"does not have the environment (the last line: {_last(output)})"
                )
        shutil.rmtree(folder, ignore_errors=True)
        return Outcome(result, error, wall, memory)

    def _environment(self, spec: Path) -> dict[str, str]:
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self._shared / "tmp"))
        return os.environ | temporary | {
            "LIGHTNING_PERF_TRIAL": str(spec), "LIGHTNING_PERF": "0",
            "MLFLOW_TRACKING_URI": f"sqlite:///{self._shared}/mlflow.db",
            "WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug", "MPLBACKEND": "Agg",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        }  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes], result: Path) -> tuple[bool, int]:
        """Wait for a trial; returns whether it took too long, and the most memory it had."""
        limit, memory = monotonic() + self.allowed, 0
        while process.poll() is None:
            memory = max(memory, _memory(process.pid))
            if monotonic() > limit:
                return True, memory
            if result.exists():  # a launcher may wait for other ranks
                limit = min(limit, monotonic() + _LAUNCHER)
            time.sleep(_PAUSE)
        return False, memory

    # -- rounds -----------------------------------------------------------------------------------

    def start(self) -> list[Candidate]:
        """Run the training as it is, with a diagnosis; returns what to try.

        Raises:
            TrialsFailed: It fails, or is too short.
        """
        before = _files(Path())
        self.first = self.run(Setting(keeps=("checkpoint", "validation")))
        after = _files(Path())
        self.written = sorted(name for name in after if before.get(name) != after[name])
        result = self.first.result
        if self.first.error is not None:
            raise TrialsFailed(f"the training fails before any change: {self.first.error}")
        median, timed = result.get("median"), sum(result["counts"])
        if not median or timed < _BATCHES[0]:
            raise TrialsFailed(
                f"the training has {timed} batches after {self._warm_up} of warm-up, and trials "
                f"need {_BATCHES[0]}"
            )
        self._plan(median, timed, result.get("epoch"))
        self.allowed = _SLOWER * self.first.wall_seconds + _GRACE
        return [Candidate(**each) for each in result["candidates"]]

    def _plan(self, median: float, timed: int, epoch: int | None) -> None:
        """Choose the batches of a trial, whole epochs if these are short."""
        least, most = _BATCHES
        batches = min(max(ceil(self._seconds / median), least), most)
        if epoch and epoch <= batches:
            batches = ceil(batches / epoch) * epoch
        ended = monotonic() - self._began < self._seconds  # by itself
        self.batches = min(batches, timed) if ended else batches

    def race(self, reference: Setting, settings: Sequence[Setting], until: float) -> None:
        """Measure settings beside a reference, until all are settled or the time is up."""
        for number in range(MOST):
            left = [each for each in settings if not self.is_settled(each, reference)]
            if not left:
                return
            references = {each.keeps: reference._replace(keeps=each.keeps) for each in left}
            order = [*references.values(), *left]
            self._round += 1
            for setting in reversed(order) if number % 2 else order:
                if monotonic() + self.first.wall_seconds > until:
                    return
                self._measure(setting)

    def _measure(self, setting: Setting) -> None:
        outcome = self.run(setting)
        self.outcomes.setdefault(setting.key, {})[self._round] = outcome
        each = outcome.error or f"{duration(outcome.per_batch)} per batch"
        self.tell(f"trial {self.count}: {setting.name}: {each}")

    def seeds(self) -> None:
        """Run the training as it is with other random numbers, once each."""
        for seed in _SEEDS:
            setting = Setting(seed=seed)
            if setting.key not in self.outcomes:
                self._measure(setting)

    # -- results ----------------------------------------------------------------------------------

    def of(self, setting: Setting) -> list[Outcome]:
        """The outcomes of a setting that have not failed."""
        kept = self.outcomes.get(setting.key, {}).values()
        return [outcome for outcome in kept if outcome.error is None]

    def failure(self, setting: Setting) -> str | None:
        """Why a setting has failed; one failure is enough."""
        kept = self.outcomes.get(setting.key, {}).values()
        return next((outcome.error for outcome in kept if outcome.error is not None), None)

    def logs(self, setting: Setting, reference: Setting) -> list[float]:
        """The logarithm of the ratio of both times in each round that has both."""
        reference = reference._replace(keeps=setting.keeps)
        ours, theirs = (self.outcomes.get(each.key, {}) for each in (setting, reference))
        return [
            log(theirs[number].per_sample / ours[number].per_sample)
            for number in sorted(ours.keys() & theirs.keys())
            if ours[number].error is None and theirs[number].error is None
        ]

    def speedup(self, setting: Setting, reference: Setting) -> Speedup | None:
        """How many times as fast a setting is as the reference; None if that is unknown."""
        logs = self.logs(setting, reference)
        if not logs:
            return None
        pair = (setting, reference._replace(keeps=setting.keeps))
        within = (np.mean([each.noise**2 for each in self.of(one)]) for one in pair)
        return speedup(logs, max(self._usual_spread(), sqrt(sum(within))))

    def _usual_spread(self) -> float:
        """The standard deviation of the same setting's time between rounds that are neighbours."""
        squares, count = 0.0, 0
        for kept in self.outcomes.values():
            numbers = sorted(number for number, each in kept.items() if each.error is None)
            for one, other in pairwise(numbers):
                squares += log(kept[one].per_sample / kept[other].per_sample) ** 2
                count += 1
        return sqrt(squares / count) if count else 0.0

    def is_settled(self, setting: Setting, reference: Setting) -> bool:
        """Whether a comparison has its answer."""
        if self.failure(setting) is not None:
            return True
        logs = self.logs(setting, reference)
        if len(logs) >= 2 and max(logs) < log(_HOPELESS):
            return True
        found = self.speedup(setting, reference)
        return found is not None and found.rounds >= _FEWEST and found.settled

    def row(self, setting: Setting) -> Row:
        """What is known of a setting, compared with the training as it is."""
        reference = Setting(keeps=setting.keeps)
        ours, theirs = self.of(setting), self.of(reference)
        predicted = setting.changes[0].predicted if len(setting.changes) == 1 else None
        failure = self.failure(setting)
        if not (ours and theirs) or failure is not None:
            return Row(setting, predicted, None, "unknown", failure or "not measured", None, 0.0)
        found = self.speedup(setting, reference)
        key = "memory"
        memory = tuple(
            max(each.result.get(key) or each.host_memory for each in some)
            for some in (theirs, ours)
        )
        startup = np.mean([each.result["startup"] or 0.0 for each in ours]) - np.mean(
            [each.result["startup"] or 0.0 for each in theirs]
        )
        same = self.same(setting) if found and found.ratio > 1 else "unknown"
        return Row(setting, predicted, found, same, None, memory, float(startup))  # type: ignore[arg-type]

    def same(self, setting: Setting) -> str:
        """Whether the training with the changes is the same one."""
        ours, theirs = self.of(setting), self.of(Setting(keeps=setting.keeps))
        others = list(chain.from_iterable(self.of(Setting(seed=seed)) for seed in _SEEDS))
        exact = all(each.exact for each in setting.changes)
        return same_training(
            ours[0].result,
            [each.result for each in theirs],
            [each.result for each in others],
            exact,
            str(self.first.result.get("dataset")),
        )

    # -- all of it --------------------------------------------------------------------------------

    def settings(self, candidates: Sequence[Candidate]) -> list[Setting]:
        """Settings with one change each, as many as there is time for."""
        found = [Setting((each,), tuple(each.keeps)) for each in candidates]
        left = _ALONE * self.seconds_left / (_FEWEST * max(self.first.wall_seconds, 1e-3))
        kept = found[: max(int(left) - 1, 1)]
        self.not_tried = [each for setting in found[len(kept) :] for each in setting.changes]
        return kept

    def results(self) -> tuple[list[Row], Row | None]:
        """Try all; returns the changes alone, and the best set of them.

        Raises:
            TrialsFailed: The training itself does not run.
        """
        candidates = self.start()
        settings = self.settings(candidates)
        share = _ALONE if len(settings) > 1 else 1.0
        self.race(Setting(), settings, monotonic() + share * self.seconds_left)
        rows = self._rows(settings)
        best = self._combined(sorted(filter(_helps, rows), key=_ratio, reverse=True))
        return self._rows(settings), best

    def _rows(self, settings: Sequence[Setting]) -> list[Row]:
        """The rows of settings. What may be alike is compared with baselines of other seeds."""
        rows = [self.row(each) for each in settings]
        if any(row.speedup and row.speedup.better and _needs_seeds(row) for row in rows):
            self.seeds()
            rows = [self.row(each) for each in settings]
        return rows

    def _combined(self, helping: Sequence[Row]) -> Row | None:
        """Add one change after the other to the best one, if the sum is faster."""
        if not helping:
            return None
        best = helping[0]
        for row in helping[1:]:
            groups = {each.group for each in best.setting.changes}
            if row.setting.changes[0].group in groups:
                continue
            keeps = tuple(sorted({*best.setting.keeps, *row.setting.keeps}))
            both = Setting((*best.setting.changes, *row.setting.changes), keeps)
            alone = best.setting._replace(keeps=keeps)
            # All three in each round: the sum is measured, not multiplied.
            self._race_sum(alone, both)
            found, added = self.row(both), self.speedup(both, alone)
            if added is not None and added.better and found.helps:
                best = found
        return best

    def _race_sum(self, alone: Setting, both: Setting) -> None:
        for number in range(MOST):
            order = [Setting(keeps=both.keeps), alone, both]
            if self.is_settled(both, alone):
                return
            self._round += 1
            for setting in reversed(order) if number % 2 else order:
                if self.seconds_left < self.first.wall_seconds:
                    return
                self._measure(setting)


def _helps(row: Row) -> bool:
    return row.helps


def _ratio(row: Row) -> float:
    return row.speedup.ratio if row.speedup else 0.0


def _needs_seeds(row: Row) -> bool:
    return not row.same.startswith("equal")


def same_training(
    ours: Mapping[str, Any],
    baselines: Sequence[Mapping[str, Any]],
    seeded: Sequence[Mapping[str, Any]],
    exact: bool,
    dataset: str,
) -> str:
    """Whether a training with a change is the same as without it, in a few words.

    ``equal``: batches and losses are the same bit by bit. ``alike``: they may differ, and losses
    differ no more than those of other seeds. ``not equal``: anything else.

    Args:
        ours: The result of a trial with the change.
        baselines: The results without it, at the same seed.
        seeded: The results without it, at other seeds.
        exact: Whether the change must not touch numbers.
        dataset: As `kind_of_items` says.
    """
    base = baselines[0]
    epoch = base.get("epoch") or None
    names = ("samples", "batches", "losses")
    kept = [{name: each.get(name, [])[:epoch] for name in names} for each in (ours, *baselines)]
    other, first = kept[0], kept[1]
    resized = ours.get("batch_size") != base.get("batch_size")
    repeats = all(_differs(first, again, names) is None for again in kept[2:])
    found = None if resized else _differs(first, other, names)
    if not repeats:
        note = "two runs as it is differ, too"
        return _within(ours, base, seeded, note)
    if found is None and not resized:
        return "equal" if first["losses"] else "unknown: no losses"
    if resized:
        return _within(ours, base, seeded, "other batches")
    name, number = found or ("losses", 0)
    if name == "samples":
        return f"not equal: batch {number} has other samples"
    if name == "batches":
        if dataset == "random":
            return _within(ours, base, seeded, "the dataset draws random numbers, in each process")
        return f"not equal: batch {number} differs"
    if exact:
        return f"not equal: the loss of batch {number} differs"
    return _within(ours, base, seeded, "rounding")


def _differs(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]
) -> tuple[str, int] | None:
    """The first of some lists that differ, and where; over what both have."""
    for name in names:
        for number, pair in enumerate(zip(one[name], other[name], strict=False)):
            if pair[0] != pair[1]:
                return name, number
    return None


def _within(
    ours: Mapping[str, Any], base: Mapping[str, Any], seeded: Sequence[Mapping[str, Any]], why: str
) -> str:
    """Whether losses differ from those without a change no more than those of other seeds do."""
    levels = [_level(each) for each in (ours, base, *seeded)]
    if len(levels) < 3 or not all(np.isfinite(levels[1:])):
        return f"unknown ({why})"
    spread = max(abs(one - other) for one, other in combinations(levels[1:], 2))
    if abs(levels[0] - levels[1]) <= spread:  # False for NaN
        return f"alike ({why})"
    return f"not equal: losses differ by more than those of other seeds ({why})"


def _level(result: Mapping[str, Any]) -> float:
    """The mean of the later half of the losses, over the same samples for each batch size."""
    losses = [float(each) for each in result.get("losses", [])]
    return float(np.mean(losses[len(losses) // 2 :])) if losses else float("nan")


def _result_in(file: Path) -> tuple[dict[str, Any], str | None]:
    """The result of a trial, or why it has failed."""
    try:
        result: dict[str, Any] = read_json(file)
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError) as why:
        return {}, f"its result is not readable: {why}"
    error = result.get("error")
    if error is None and not result.get("counts"):
        error = "the training ended before the batches that are timed"
    return ({}, str(error)) if error else (result, None)


def _last(output: Path) -> str:
    """The last line of a command's output."""
    text = read_bytes(output)[-_LAST_BYTES:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1])[:300] if lines else "it printed nothing"


def _memory(pid: int) -> int:
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, those that outlive it included."""
    below: list[psutil.Process] = []
    with suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
    for each in below:
        with suppress(psutil.Error):
            each.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
    if sys.platform != "win32":
        with suppress(OSError):  # the group has ended
            os.killpg(process.pid, signal.SIGKILL)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of the files below a folder, of the first levels."""
    found: dict[str, tuple[int, int]] = {}
    for path, names in walked(folder, _LEVELS, lambda name: name not in _HIDDEN):
        for name in names:
            with suppress(OSError):
                stat = (path / name).lstat()
                found[str(path / name)] = stat.st_size, stat.st_mtime_ns
        if len(found) > _MOST_FILES:
            break
    return found
