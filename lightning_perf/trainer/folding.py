"""Lightning's hooks of each stage, which differ by their names only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_perf.moment import STAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.trainer.hooks import PerfCallback

_WORDS = dict(zip(STAGES, ("train", "validation", "test", "predict"), strict=True))


def fold(callback: type[PerfCallback]) -> None:
    """Give a class the hooks of all stages, which call a few methods of its own."""
    for stage, word in _WORDS.items():
        hooks = {
            "start": _start(stage, word),
            "end": _end(stage),
            "batch_start": _batch_start(stage),
            "batch_end": _batch_end(stage),
        }
        for name, hook in hooks.items():
            hook.__name__ = f"on_{word}_{name}"
            setattr(callback, hook.__name__, hook)


def _start(stage: str, word: str) -> Callable[..., None]:
    def start(self: PerfCallback, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._begin(stage, word)

    return start


def _end(stage: str) -> Callable[..., None]:
    def end(self: PerfCallback, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(stage)

    return end


# Each call of Python's takes a microsecond of every batch, so these two make few.


def _batch_start(stage: str) -> Callable[..., None]:
    def batch_start(
        self: PerfCallback, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any
    ) -> None:
        driver = self._driver
        if driver is None or driver.stage != stage:
            return
        for part in self._early:
            part.call("before_batch", driver, batch)

    return batch_start


def _batch_end(stage: str) -> Callable[..., None]:
    def batch_end(
        self: PerfCallback,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        *_: Any,
    ) -> None:
        driver = self._driver
        if driver is None or driver.stage != stage:
            return
        if driver.members[0] is self:
            try:
                driver.end_batch(batch)
            except Exception as error:
                self._all_give_up("end_batch", error)
        for part in self._late:
            if not part._given_up:
                try:
                    part.after_batch(driver, batch)
                except Exception as error:
                    part._give_up("after_batch", error)
        if driver.exchange.asked and driver.members[-1] is self:
            self._drive("report", False)

    return batch_end
