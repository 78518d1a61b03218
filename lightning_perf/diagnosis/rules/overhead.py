"""Rules about what runs beside the batches: callbacks, loggers, checkpoints, validation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from lightning_perf.diagnosis.rules.base import Impact, judge
from lightning_perf.diagnosis.signals import COMPILE, GC
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_perf.diagnosis.signals import Signals
    from lightning_perf.diagnosis.verdicts import Verdict
    from lightning_perf.timing.totals import Action

#: Lightning's own progress bars, which have a refresh rate.
_BARS = ("TQDMProgressBar", "RichProgressBar")


def by_class(signals: Signals, rows: Iterable[Action]) -> list[tuple[list[Action], Action]]:
    """The named actions of each class, and the most costly of them."""
    groups: defaultdict[str, list[Action]] = defaultdict(list)
    for row in rows:
        owner, dot, _ = row.name.partition(".")
        if dot and owner != "Trainer":  # what Lightning itself does, such as broadcasts
            groups[owner].append(row)
    return [
        (group, max(group, key=lambda row: signals.actions[row].seconds.sum()))
        for group in groups.values()
    ]


class CallbackBound:
    """Hooks of a callback, or of the module, take long."""

    code, threshold = "callback-bound", 0.05
    categories: tuple[str, ...] = ("callbacks", "other")

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """One verdict per class."""
        for group, slowest in by_class(signals, signals.rows(*self.categories)):
            spent, times = signals.actions[slowest]
            calls = max(float(times.sum()), 1.0)
            each = float(spent.sum()) / calls
            owner = slowest.name.partition(".")[0]
            advice = (
                f"{slowest.name} takes {duration(each)} per call. Call its work less often, or "
                "move it off the training thread."
            )
            if owner in _BARS:
                advice = f"{owner} takes {duration(each)} per update: raise its refresh_rate."
            evidence = {"calls": calls, "seconds_per_call": each}
            events = calls if calls < 0.5 * signals.batches else None
            impact = Impact(
                signals.total(group).seconds, events, slowest.name, slowest.category,
                evidence=evidence, advice=advice,
            )  # fmt: skip
            yield from judge(self.code, self.threshold, signals, impact)


class LoggerBound(CallbackBound):
    """Writing metrics takes long."""

    code, categories = "logger-bound", ("logging",)

    @override
    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """One verdict per logger."""
        every, step = signals.setup.log_every_n_steps, signals.step_seconds
        for found in super().__call__(signals):
            rarer = every * max(round(found.share / self.threshold * 4), 2)
            faster = step * (1 - found.share * (1 - every / rarer))
            each = duration(float(found.evidence["seconds_per_call"]))
            advice = (
                f"{found.culprit} takes {each} per call. Trainer(log_every_n_steps={rarer}) "
                f"instead of {every} gives {duration(faster)} per step instead of {duration(step)}."
            )
            more = {"log_every_n_steps": float(every), "advised_step_seconds": faster}
            yield replace(found, advice=advice, evidence={**found.evidence, **more})


class CheckpointBound:
    """Writing checkpoints takes long."""

    code, threshold = "checkpoint-bound", 0.05

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """All of the category; the culprit is the hook that writes most."""
        apart = ("", GC, COMPILE)
        rows = [r for r in signals.actions if r.category == "checkpoint" and r.stage not in apart]
        writes = [row for row in rows if row.name.startswith("checkpoint writing")]
        seconds = signals.category("checkpoint")
        if not writes:
            return
        slowest = max(rows, key=lambda row: signals.actions[row].seconds.sum())
        saves = max(signals.total(writes).calls.sum(), 1.0)
        each = float(seconds.sum() / saves)
        interval = signals.batches / saves
        step = signals.step_seconds
        rarer = max(round(interval * signals.share(seconds) / self.threshold * 2), 2)
        faster = step * (1 - signals.share(seconds) * (1 - interval / rarer))
        culprit = slowest.name.removeprefix("checkpoint writing (").removesuffix(")")
        advice = (
            f"A checkpoint takes {duration(each)} and is written every {interval:.0f} batches. "
            f"Every {rarer} batches gives {duration(faster)} per step instead of {duration(step)} "
            "(ModelCheckpoint(every_n_train_steps=...)); save_weights_only=True writes less."
        )
        evidence = {
            "checkpoints": float(saves),
            "seconds_per_checkpoint": each,
            "batches_between": float(interval),
        }
        impact = Impact(
            seconds, float(saves), culprit, "checkpoint", evidence=evidence, advice=advice,
            whole_run=True,
        )  # fmt: skip
        yield from judge(self.code, self.threshold, signals, impact)


class ValidationBound:
    """Validation takes long."""

    code, threshold = "validation-bound", 0.15

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """All of the category; the culprit is what it spends most of its time on."""
        seconds = signals.category("validation")
        if not seconds.any():
            return
        rows = [row for row in signals.actions if row.stage == "validate"]
        costs: defaultdict[str, float] = defaultdict(float)
        for row in rows:
            costs[row.category] += float(signals.actions[row].seconds.sum())
        phase = max(costs, key=costs.__getitem__, default="validation")
        runs = float(np.count_nonzero(seconds > 0.5 * seconds.max()))
        share = float(seconds.sum() / signals.wall.sum())
        advice = (
            f"Validation takes {share:.0%} of the time. Half as often (val_check_interval, "
            f"check_val_every_n_epoch) or half as many batches (limit_val_batches) makes training "
            f"{1 / (1 - share / 2):.2f}x faster."
        )
        if phase == "dataloader_next":
            advice += " Most of it is waiting for data: give its DataLoader workers."
        evidence: dict[str, float | str] = {"mostly": phase, "windows_with_validation": runs}
        impact = Impact(
            seconds, 2.0, f"validate.{phase}", "validation", evidence=evidence, advice=advice,
            whole_run=True, on_host=False,
        )  # fmt: skip
        yield from judge(self.code, self.threshold, signals, impact)
