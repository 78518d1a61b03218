"""Texts that a run leaves behind: written like traces, beside them, and uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.trace import TraceWriter, distinct_run_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_perf.trainer.driver import Driver


def leave(driver: Driver, folder: str, texts: Mapping[str, str], stage: str) -> None:
    """Write texts below the trainer's ``default_root_dir``, and to MLflow as artifacts.

    Args:
        driver: The run.
        folder: Format string of the folder, as for profilers.
        texts: By file name.
        stage: What they tell of; other stages than train have a folder of their own.

    Raises:
        OSError: If the folder cannot be written to.
    """
    root = Path(driver.trainer.default_root_dir)
    name = distinct_run_name(root, folder, driver.ranks, driver.run_name, driver.identity)
    for filename, text in texts.items():
        writer = TraceWriter(
            driver.worker,
            root,
            folder,
            filename,
            f"{folder}/{filename}",
            driver.ranks,
            name,
            compress=False,
            upload=driver.upload,
            upload_target=driver.upload_target,
        )
        driver.at_end(writer.close)
        spooled = writer.spool(stage)
        spooled.write_text(text, encoding="utf-8")
        writer.write(spooled, driver.progress.timestamp(stage), stage)
