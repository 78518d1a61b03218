"""The trace writer: name -> compress -> place -> upload -> prune, on the standard library only."""

from lightning_perf.trace.names import file_format, folder_format, remote_format
from lightning_perf.trace.pending import PendingUpload, read_pending, rewrite_pending
from lightning_perf.trace.targets import Target
from lightning_perf.trace.urls import split_url
from lightning_perf.trace.worker import Worker
from lightning_perf.trace.writer import TraceWriter, check_names

__all__ = [
    "PendingUpload",
    "Target",
    "TraceWriter",
    "Worker",
    "check_names",
    "file_format",
    "folder_format",
    "read_pending",
    "remote_format",
    "rewrite_pending",
    "split_url",
]
