"""A fake upload server, functions that write recordings, and a competing profiler."""

from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import schedule

from lightning_perf.core.progress import Timestamp

PATIENCE = 60.0
CONTENT = b'{"traceEvents": []}' * 100


class Server:
    """An uploader that keeps the files it receives, after `failures` failed attempts."""

    def __init__(self, failures=0, message="no route to host"):
        self.failures, self.message = failures, message
        self.files = {}
        self.attempts = 0

    def __call__(self, path, remote):
        self.attempts += 1
        if self.attempts <= self.failures:
            raise ConnectionError(self.message)
        self.files[remote] = path.read_bytes()


def record(writer, batch=5, stage="train", content=CONTENT, prepare=None):
    """Write a recording like a profiler at the end of a window."""
    spooled = writer.spool(stage)
    spooled.write_bytes(content)
    return writer.write(spooled, Timestamp(batch=batch), stage, prepare)


def after(worker, written):
    """The result for the job given to the worker, once the worker is done with it."""
    assert worker.drain(PATIENCE)
    return written


def tried(worker):
    """Wait until the files are placed and each upload was attempted once."""
    for _ in range(2):
        worker.call(lambda: None, PATIENCE)


def files(folder):
    """All files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def theirs_in(folder):
    """Lightning's own profiler, which warms up in batch 4 and records batches 5 to 7."""
    phases = schedule(wait=4, warmup=1, active=3, repeat=1)
    return PyTorchProfiler(dirpath=folder, filename="theirs", schedule=phases)
