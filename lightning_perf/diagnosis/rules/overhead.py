"""Rules about what runs beside the batches: callbacks, loggers, checkpoints, validation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.diagnosis.rules.base import Impact, judge
from lightning_perf.diagnosis.signals import COMPILE, GC
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_perf.diagnosis.signals import Signals
    from lightning_perf.diagnosis.verdicts import Verdict
    from lightning_perf.timing.totals import Action

#: Shares of the wall time from which on these are worth a warning.
LOGGERS, CHECKPOINTS = 0.05, 0.05
#: Lightning's own progress bars, which have a refresh rate.
_BARS = ("TQDMProgressBar", "RichProgressBar")


def callback_bound(
    signals: Signals, categories: tuple[str, ...] = ("callbacks", "other")
) -> Iterable[Impact]:
    """Hooks of a callback, or of the module, take long: one impact per class."""
    classes: defaultdict[str, list[Action]] = defaultdict(list)
    for row in signals.rows(*categories):
        owner, dot, _ = row.name.partition(".")
        if dot and owner != "Trainer":  # what Lightning itself does, such as broadcasts
            classes[owner].append(row)
    for owner, rows in classes.items():
        slowest = max(rows, key=signals.seconds)
        calls = max(float(signals.actions[slowest].calls.sum()), 1.0)
        each = signals.seconds(slowest) / calls
        advice = (
            f"{slowest.name} takes {duration(each)} per call. Call its work less often, or "
            "move it off the training thread."
        )
        if owner in _BARS:
            advice = f"{owner} takes {duration(each)} per update: raise its refresh_rate."
        yield Impact(
            signals.total(rows).seconds, calls if calls < 0.5 * signals.batches else None,
            slowest.name, slowest.category, advice=advice,
            evidence={"calls": calls, "seconds_per_call": each},
        )  # fmt: skip


def logger_bound(signals: Signals) -> Iterable[Verdict]:
    """Writing metrics takes long: one verdict per logger."""
    every, step = signals.setup.log_every_n_steps, signals.step_seconds
    for impact in callback_bound(signals, ("logging",)):
        for found in judge("logger-bound", LOGGERS, signals, impact):
            rarer = every * max(round(found.share / LOGGERS * 4), 2)
            faster = step * (1 - found.share * (1 - every / rarer))
            each = duration(float(found.evidence["seconds_per_call"]))
            advice = (
                f"{found.culprit} takes {each} per call. Trainer(log_every_n_steps={rarer}) "
                f"instead of {every} gives {duration(faster)} per step instead of {duration(step)}."
            )
            more = {"log_every_n_steps": float(every), "advised_step_seconds": faster}
            yield replace(found, advice=advice, evidence={**found.evidence, **more})


def checkpoint_bound(signals: Signals) -> Iterable[Impact]:
    """Writing checkpoints takes long; the culprit is the hook that writes most."""
    apart = ("", GC, COMPILE)
    rows = [r for r in signals.actions if r.category == "checkpoint" and r.stage not in apart]
    writes = [row for row in rows if row.name.startswith("checkpoint writing")]
    if not writes:
        return
    seconds = signals.category("checkpoint")
    saves = max(float(signals.total(writes).calls.sum()), 1.0)
    each = float(seconds.sum() / saves)
    interval = signals.batches / saves
    step, share = signals.step_seconds, signals.share(seconds)
    rarer = max(round(interval * share / CHECKPOINTS * 2), 2)
    faster = step * (1 - share * (1 - interval / rarer))
    slowest = max(rows, key=signals.seconds).name
    advice = (
        f"A checkpoint takes {duration(each)} and is written every {interval:.0f} batches. "
        f"Every {rarer} batches gives {duration(faster)} per step instead of {duration(step)} "
        "(ModelCheckpoint(every_n_train_steps=...)); save_weights_only=True writes less."
    )
    evidence = {
        "checkpoints": saves, "seconds_per_checkpoint": each, "batches_between": interval,
    }  # fmt: skip
    yield Impact(
        seconds, saves, slowest.removeprefix("checkpoint writing (").removesuffix(")"),
        "checkpoint", evidence=evidence, advice=advice, whole_run=True,
    )  # fmt: skip


def validation_bound(signals: Signals) -> Iterable[Impact]:
    """Validation takes long; the culprit is what it spends most of its time on."""
    seconds = signals.category("validation")
    if not seconds.any():
        return
    costs: defaultdict[str, float] = defaultdict(float)
    for row in signals.actions:
        if row.stage == "validate":
            costs[row.category] += signals.seconds(row)
    phase = max(costs, key=costs.__getitem__, default="validation")
    share = float(seconds.sum() / signals.wall.sum())
    advice = (
        f"Validation takes {share:.0%} of the time. Half as often (val_check_interval, "
        f"check_val_every_n_epoch) or half as many batches (limit_val_batches) makes training "
        f"{1 / (1 - share / 2):.2f}x faster."
    )
    if phase == "dataloader_next":
        advice += " Most of it is waiting for data: give its DataLoader workers."
    runs = float(np.count_nonzero(seconds > 0.5 * seconds.max()))
    yield Impact(
        seconds, 2.0, f"validate.{phase}", "validation", advice=advice, whole_run=True,
        on_host=False, evidence={"mostly": phase, "windows_with_validation": runs},
    )  # fmt: skip
