"""The trace writer: name, compress, place, upload and prune files. No torch, no Lightning."""

from lightning_perf.traces.names import file_format, folder_format, remote_format
from lightning_perf.traces.uploads import PendingUpload, read_pending, rewrite_pending, split_url
from lightning_perf.traces.writer import Target, TraceWriter, check_names

__all__ = [
    "PendingUpload",
    "Target",
    "TraceWriter",
    "check_names",
    "file_format",
    "folder_format",
    "read_pending",
    "remote_format",
    "rewrite_pending",
    "split_url",
]
