"""The files of a run: options, names and folders, and which run owns a folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from errno import ENOTDIR
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lightning_perf.background import wait_until
from lightning_perf.files import NotRegularError, read_bytes
from lightning_perf.traces.names import (
    IN_EPOCH,
    TOTALS,
    NameFormat,
    Value,
    file_format,
    folder_format,
    numbered,
    remote_format,
    run_values,
    split_url,
    time_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_perf.core.progress import Ranks, Timestamp
    from lightning_perf.traces.uploads import TraceRun


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How the files of one recorder are named, compressed, uploaded and kept."""

    #: Format string of the folder.
    folder: str
    #: Format string of the file names.
    filename: str
    #: Format string of the names at the upload targets; None disables the upload.
    remote_file_name: str | None = None
    #: Whether to compress with gzip; appends ``.gz`` to both names, once.
    compress: bool = False
    #: Whether to replace files of the same name. Otherwise a new one gets a number.
    overwrite: bool = False
    #: How many of the latest files stay on the disk; -1 for all. Older ones are deleted once they
    #: are uploaded, never before. Without an upload at least one file stays: it is the only copy.
    num_traces_to_keep: int = -1
    #: The content of a ``README.md`` beside the files, here and at the targets; None for no file.
    #: An existing file of that name stays.
    readme: str | None = None
    #: Whether a file is left out if it was not started at the end of the run.
    optional: bool = False
    #: Whether to wait for the disk, so that a file survives a crash of the machine.
    durable: bool = True


def conflicts(
    pattern: NameFormat, values: Mapping[str, Value], folder: Path, now: Timestamp
) -> Path | None:
    """The first file, by name, of this pattern in a folder that is later than `now`, or None.

    A file is later if a total in its name is greater, or if a count within the epoch is greater
    and the epoch is the same. Both are compared as formatted in the name. A file of exactly this
    time is not a conflict: a checkpoint and a trace often fall on one batch, and a resume must
    work. A name without time variables conflicts if the file exists. Hidden files are ignored.
    ``values`` are those of all variables except time.
    """
    present = pattern.read(pattern.render({**values, **time_values(now)}), values) or {}
    for path in sorted(folder.glob("/".join(["*"] * (pattern.depth + 1)))):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            times = pattern.read(name.as_posix(), values)
            if times is not None and _is_after(times, present):
                return path
    return None


def _is_after(times: Mapping[str, float], present: Mapping[str, float]) -> bool:
    comparable: tuple[str, ...] = TOTALS
    if times.get("epoch") == present.get("epoch"):
        comparable += IN_EPOCH
    return not times or any(times[name] > present[name] for name in comparable if name in times)


#: The file with the identity of the run that owns a folder.
MARKER = ".run"
README = "README.md"


class RunFolder:
    """The folder of one recorder, which no other run uses.

    Its name contains the run's name, or, if another run of that name was first, the name with a
    part of the run's identity. The first recorder that writes marks the folder whose name contains
    the run's name. So all ranks and recorders on one file system find the same folder, concurrent
    runs find different ones, and ranks without a common file system agree on the second name.

    A folder whose pattern has no ``{run_name}`` belongs to the user: it is neither marked nor
    renamed, as if ``identity`` were None. ``patience`` is how many seconds to wait for another rank
    that has created a marker and not yet written it.
    """

    def __init__(
        self,
        root: Path,
        folder: str,
        ranks: Ranks,
        run_name: str,
        identity: str | None,
        patience: float = 2.0,
    ) -> None:
        pattern = folder_format(folder)
        names = [run_name] if identity is None else [run_name, distinct_name(run_name, identity)]
        self._identity, self._names, self._patience = identity or "", names, patience
        self._folders = [Path(root, pattern.render(run_values(name, ranks))) for name in names]
        # Those of rank 0, so that all ranks mark the same folder: the part up to the run's name.
        leader = replace(ranks, global_rank=0, local_rank=0, node_rank=0)
        leading = [Path(root, pattern.render(run_values(name, leader))) for name in names]
        shared = os.path.commonpath([*leading])
        depth = len(Path(shared).parts) + 1
        self._marked = [Path(*path.parts[:depth]) for path in leading if path != Path(shared)]
        self._claimed: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the files, or of the first file if it were written now."""
        return self._claimed or self._choose(self._owner)

    @property
    def run_name(self) -> str:
        """The run's name as it is in the folder's name."""
        return self._names[self._folders.index(self.folder)]

    def claim(self) -> Path:
        """Mark the folder as the run's and return it; later calls return the same folder."""
        if self._claimed is None:
            self._claimed = self._choose(self._mark)
        return self._claimed

    def _choose(self, owner_of: Callable[[Path], str]) -> Path:
        """The first folder that no other run owns, or the last one."""
        for marked, folder in zip(self._marked, self._folders, strict=False):
            if owner_of(marked) == self._identity:
                return folder
        return self._folders[-1]

    def _owner(self, folder: Path) -> str:
        """The identity of the run that owns the folder; our own if no run does."""
        try:
            return read_bytes(folder / MARKER).decode(errors="replace")
        except NotRegularError:
            return f"not {self._identity}"
        except OSError:
            return self._identity

    def _mark(self, folder: Path) -> str:
        """As `_owner`, after marking a folder that no run owned."""
        make_folder(folder)
        marker = folder / MARKER
        try:
            with marker.open("x", encoding="utf-8") as file:
                file.write(self._identity)
        except FileExistsError:
            wait_until(lambda: marker.stat().st_size > 0, self._patience)
            return self._owner(folder)
        except OSError:  # full disk: other ranks must not wait for an empty marker
            marker.unlink(missing_ok=True)
            raise
        return self._identity


def distinct_name(run_name: str, identity: str) -> str:
    """The run's name with eight characters that distinguish it from other runs of that name.

    They are the first characters of an identity that is a UUID, else of its hash. A name that is
    the identity itself is returned unchanged.

    Example:
        >>> distinct_name("owl-7", "3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b8c")
        'owl-7-3f2a1b0c'
    """
    if identity == run_name:
        return run_name
    is_id = re.fullmatch(r"[0-9a-f]{32}", identity)
    return f"{run_name}-{(identity if is_id else sha256(identity.encode()).hexdigest())[:8]}"


def make_folder(folder: Path) -> None:
    """Create a folder; never raises `FileExistsError`, which means traces of another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(folder)) from error


def folder_of(run: TraceRun, folder: str) -> RunFolder:
    """The folder of a run's files, from its format string."""
    name, identity = run.run_name, run.identity
    if run.mirror is not None and identity is not None:  # the store holds runs of all machines
        name, identity = distinct_name(name, identity), None
    return RunFolder(run.root, folder, run.ranks, name, identity)


class FileNames:
    """The names of one recorder's files; those of stages other than train are in a subfolder."""

    def __init__(self, options: TraceOptions, run: TraceRun) -> None:
        gz, remote = options.compress, options.remote_file_name
        self._overwrite = options.overwrite
        self._file = file_format(options.filename, gz=gz)
        self._remote = None if remote is None else remote_format(remote, gz=gz)
        name, identity, ranks = run.run_name, run.identity, run.ranks
        distinct = name if identity is None else distinct_name(name, identity)
        # Stores hold runs of all machines; in MLflow each run has its own artifacts.
        in_store = remote is not None and bool(split_url(remote).protocol)
        self._values = run_values(name, ranks)
        self._remote_values = run_values(distinct if in_store else name, ranks)
        #: Where the files are.
        self.folder = folder_of(run, options.folder)
        suffix = re.search(r"\.\w+$", options.filename.removesuffix(".gz"))
        self._suffix = suffix[0] if suffix else ""
        self._take = partial(run.taken.take, most=run.most_remembered)

    def conflict(self, now: Timestamp, stage: str) -> Path | None:
        """A file of the stage that is later than `now`, or None."""
        values = {**self._values, "stage": stage}
        return conflicts(self._file, values, _within(self.folder.folder, stage), now)

    def spool(self, stage: str) -> Path:
        """As `TraceWriter.spool`."""
        folder = _within(self.folder.claim(), stage)
        make_folder(folder)
        # Random, so that no other user with write access to the folder can create a link of that
        # name.
        number = f"{self._values['rank']}-{os.urandom(8).hex()}"
        return folder / f".spool-rank{number}{self._suffix}"

    def reserve(
        self, timestamp: Timestamp, stage: str, raw: bool = False
    ) -> tuple[Path, str | None]:
        """The local path and the remote name of a new trace; each path is given once.

        A name that is taken gets a number, unless files may be overwritten. A `raw` file could not
        be compressed: its names have no ``.gz``.
        """
        values = {**self._values, **time_values(timestamp), "stage": stage}
        folder, name = _within(self.folder.folder, stage), self._file.render(values)
        remote = self._remote_path(timestamp, stage)
        if remote is not None and stage != "train":
            remote = remote.parent / stage / remote.name
        if raw:
            name = name.removesuffix(".gz")
            remote = None if remote is None else remote.with_name(remote.name.removesuffix(".gz"))
        number = 1 if self._overwrite else self._take(folder / name)
        if remote is not None:
            remote = remote.with_name(numbered(remote.name, number))
        return folder / numbered(name, number), None if remote is None else str(remote)

    def readme(self, timestamp: Timestamp, stage: str) -> tuple[Path, str | None]:
        """The local path and the remote name of the README, in the folder that all stages share.

        It has no remote name in the root of a target, where it would be among the user's files.
        """
        remote = self._remote_path(timestamp, stage)
        path = self.folder.folder / README
        if remote is None or remote.parent == PurePosixPath():
            return path, None
        return path, str(remote.parent / README)

    def _remote_path(self, timestamp: Timestamp, stage: str) -> PurePosixPath | None:
        if self._remote is None:
            return None
        values = {**self._remote_values, **time_values(timestamp), "stage": stage}
        return PurePosixPath(self._remote.render(values))


def _within(folder: Path, stage: str) -> Path:
    return folder if stage == "train" else folder / stage
