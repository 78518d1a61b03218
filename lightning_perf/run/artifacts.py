"""The files of a run: trace writers for profilers, and texts and pages written like traces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lightning_perf.traces.folder import TraceOptions
from lightning_perf.traces.uploads import TraceRun
from lightning_perf.traces.writer import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from lightning_perf.run.context import RunContext


def new_writer(
    context: RunContext, options: TraceOptions, prefix: str | None = None
) -> TraceWriter:
    """A trace writer that is closed at the end of the run.

    Its folder is below ``prefix``, by default the trainer's ``default_root_dir``.
    """
    root = context.reporting.root(prefix)
    run = TraceRun(
        worker=context.worker,
        file_worker=context.file_worker,
        root=root.path,
        ranks=context.ranks,
        run_name=context.run_name,
        identity=context.identity,
        mirror=root.mirror,
        digest=context.warnings_digest,
    )
    writer = TraceWriter(options, run, context.targets(options.remote_file_name))
    # After the worker has stopped, the writer places the files that a slow server delayed.
    context.on_close(writer.close)
    return writer


def leave(
    context: RunContext,
    folder: str,
    files: Mapping[str, Callable[[Path], None]],
    stage: str,
    *,
    overwrite: bool = False,
) -> None:
    """Write files below the trainer's ``default_root_dir``, and to MLflow as artifacts.

    Args:
        context: The run.
        folder: Format string of the folder.
        files: For each file name, a function that writes the file; called on the worker thread.
        stage: The stage that they describe, as for traces.
        overwrite: Whether to replace files.

    Raises:
        OSError: If the folder cannot be written to.
    """
    for filename, write in files.items():
        options = TraceOptions(
            folder=folder,
            filename=filename,
            remote_file_name=f"{folder}/{filename}",
            overwrite=overwrite,
        )
        writer = new_writer(context, options)
        spooled = writer.spool(stage)
        writer.write(spooled, context.progress.timestamp(stage), stage, partial(write, spooled))
