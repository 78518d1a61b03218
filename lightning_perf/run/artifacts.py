"""The files of a run: trace writers for profilers, and texts and pages written like traces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lightning_perf.traces import TraceOptions, TraceRun, TraceWriter

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
    """A trace writer that is closed at the end of the run.

    Args:
        context: The run.
        prefix: What `folder` is below; by default the trainer's ``default_root_dir``.
        folder: This and all others: as in `TraceOptions`.
        filename: The file names.
        remote: The names at the upload targets.
        compress: Whether to compress.
        overwrite: Whether to replace files.
        num_traces_to_keep: How many files stay.
        readme: The content of the README.
        optional: Whether files may be left out at the end of the run.
    """
    options = TraceOptions(
        folder=folder,
        filename=filename,
        remote_file_name=remote,
        compress=compress,
        overwrite=overwrite,
        num_traces_to_keep=num_traces_to_keep,
        readme=readme,
        optional=optional,
    )
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
    writer = TraceWriter(options, run, context.targets(remote))
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
        remote = f"{folder}/{filename}"
        writer = new_writer(context, None, folder, filename, remote, overwrite=overwrite)
        spooled = writer.spool(stage)
        writer.write(spooled, context.progress.timestamp(stage), stage, partial(write, spooled))
