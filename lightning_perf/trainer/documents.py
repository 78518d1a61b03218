"""Texts and pictures that a run leaves behind: written like traces, beside them, and uploaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.trace import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_perf.trainer.driver import Driver


def leave(
    driver: Driver, folder: str, files: Mapping[str, Callable[[Path], None]], stage: str
) -> None:
    """Write files below the trainer's ``default_root_dir``, and to MLflow as artifacts.

    Args:
        driver: The run.
        folder: Format string of the folder, as for profilers.
        files: What writes each, by its name; called on the worker thread.
        stage: What they tell of; other stages than train have a folder of their own.

    Raises:
        OSError: If the folder cannot be written to.
    """
    for filename, write in files.items():
        remote = f"{folder}/{filename}"
        writer = TraceWriter(
            driver.worker,
            Path(driver.trainer.default_root_dir),
            folder,
            filename,
            remote,
            driver.ranks,
            driver.run_name,
            compress=False,
            identity=driver.identity,
            targets=driver.targets(remote),
            maker=driver.maker,
            complaints=driver.complaints,
        )
        driver.at_end(writer.close)
        spooled = writer.spool(stage)
        writer.write(spooled, driver.progress.timestamp(stage), stage, partial(write, spooled))
