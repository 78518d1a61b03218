"""The trace writer: name -> compress -> place -> upload -> prune, on the standard library only."""

from lightning_perf.trace.names import file_format, folder_format, remote_format
from lightning_perf.trace.owner import distinct_run_name
from lightning_perf.trace.pending import PendingUpload, read_pending, rewrite_pending
from lightning_perf.trace.worker import Worker
from lightning_perf.trace.writer import TraceWriter, check_names

__all__ = [
    "PendingUpload",
    "TraceWriter",
    "Worker",
    "check_names",
    "distinct_run_name",
    "file_format",
    "folder_format",
    "read_pending",
    "remote_format",
    "rewrite_pending",
]
