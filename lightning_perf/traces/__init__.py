"""The trace writer: name, compress, place, upload and prune files. No torch, no Lightning."""

from lightning_perf.traces.folder import TraceOptions, check_names
from lightning_perf.traces.names import file_format, folder_format, remote_format, split_url
from lightning_perf.traces.uploads import (
    PendingUpload,
    Target,
    TraceRun,
    read_pending,
    rewrite_pending,
)
from lightning_perf.traces.writer import TraceWriter

__all__ = [
    "PendingUpload",
    "Target",
    "TraceOptions",
    "TraceRun",
    "TraceWriter",
    "check_names",
    "file_format",
    "folder_format",
    "read_pending",
    "remote_format",
    "rewrite_pending",
    "split_url",
]
