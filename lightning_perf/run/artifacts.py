"""Files of a run: writers of traces, and texts and pages that are written like traces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lightning_perf.traces import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from lightning_perf.run.context import RunContext


def new_writer(
    context: RunContext,
    prefix: str | None,
    folder: str,
    filename: str,
    remote: str | None,
    compress: bool = False,
    *,
    overwrite: bool = False,
    num_traces_to_keep: int = -1,
    readme: str | None = None,
    optional: bool = False,
) -> TraceWriter:
    """A pipe for files of one kind, which the end of the run closes.

    Args:
        context: The run.
        prefix: The folder that `folder` lies under; by default the trainer's ``default_root_dir``.
        folder: As for `TraceWriter`.
        filename: As for `TraceWriter`.
        remote: As for `TraceWriter`.
        compress: As for `TraceWriter`.
        overwrite: As for `TraceWriter`.
        num_traces_to_keep: As for `TraceWriter`.
        readme: As for `TraceWriter`.
        optional: As for `TraceWriter`.
    """
    root = context.reporting.root(prefix)
    writer = TraceWriter(
        context.worker,
        root.path,
        folder,
        filename,
        remote,
        context.ranks,
        context.run_name,
        compress,
        identity=context.identity,
        overwrite=overwrite,
        num_traces_to_keep=num_traces_to_keep,
        targets=context.targets(remote),
        readme=readme,
        file_worker=context.file_worker,
        warnings_digest=context.warnings_digest,
        optional=optional,
        mirror=root.mirror,
    )
    # Once the worker has stopped, the writer places here what a hung server held back.
    context.on_close(writer.close)
    return writer


def leave(
    context: RunContext, folder: str, files: Mapping[str, Callable[[Path], None]], stage: str
) -> None:
    """Write files below the trainer's ``default_root_dir``, and to MLflow as artifacts.

    Args:
        context: The run.
        folder: Format string of the folder, as for profilers.
        files: What writes each, by its name; called on the worker thread.
        stage: What they tell of; other stages than train have a folder of their own.

    Raises:
        OSError: If the folder cannot be written to.
    """
    for filename, write in files.items():
        writer = new_writer(context, None, folder, filename, f"{folder}/{filename}")
        spooled = writer.spool(stage)
        writer.write(spooled, context.progress.timestamp(stage), stage, partial(write, spooled))
