"""How to write a profiler: an example that records cProfile statistics, in fewer than 60 lines."""

from __future__ import annotations

import cProfile
import inspect
import pstats
import re
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
from helpers.small import Records, Small, ours, trainer
from jsonargparse import ArgumentParser

from lightning_perf import (
    ConfigError,
    MemorySnapshot,
    Memray,
    PerfWarning,
    Profiler,
    PyTorch,
    Suite,
    VizTracer,
)
from lightning_perf.extend import Names, Recorded, Recording, refuse_python_profiler
from lightning_perf.profilers.tools import has_python_profiler

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_perf.run.context import RunContext
    from lightning_perf.schedule import Schedule


class CProfile(Profiler):
    """Records the time per Python function with cProfile, for ``snakeviz`` or ``pstats``.

    Args:
        schedule: The batches to record.
        folder: Format string of the folder.
        filename: Format string of the file.
        remote_file_name: Format string of the artifact in MLflow; None disables the upload.
        top: Number of functions in a text beside each file; 0 for no text.
        **kwargs: The other arguments of every profiler.
    """

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        folder: str = "{run_name}/cprofile",
        filename: str = "rank{rank}.{batch}.pstats",
        remote_file_name: str | None = "{run_name}/cprofile/rank{rank}.{batch}.pstats",
        top: int = 20,
        **kwargs: Any,
    ) -> None:
        names = {"folder": folder, "filename": filename, "remote_file_name": remote_file_name}
        super().__init__(schedule, **names, **kwargs)
        self.top = top

    @property
    def further_files(self) -> dict[str, Names]:
        """A text with the most costly functions."""
        return {"table": self.beside(".txt")} if self.top else {}

    def record(self, path: Path, context: RunContext, warmup: int) -> Recording:
        """Record on the training thread; write the files on the worker thread."""
        refuse_python_profiler(self)  # raises RecorderBusy: the window is skipped
        profiler = cProfile.Profile()
        profiler.enable()
        yield None
        profiler.disable()
        return Recorded(
            finish=lambda: profiler.dump_stats(path),
            further={"table": lambda target: self._table(profiler, target)} if self.top else {},
        )

    def _table(self, profiler: cProfile.Profile, target: Path) -> None:
        with target.open("w") as text:
            pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(self.top)


def test_a_new_profiler_takes_at_most_60_lines() -> None:
    """The example above is complete."""
    assert len(inspect.getsource(CProfile).splitlines()) <= 60


def test_it_records_windows_and_uploads(tmp_path: Path) -> None:
    """It has windows, stages, names and ``saved_traces`` from the base class."""
    profiler = CProfile(schedule="every 4ba for 2ba")
    run = trainer(tmp_path, profiler, logger=Records(), limit_val_batches=6)
    run.fit(Small())
    folder = tmp_path / "records-version_0" / "cprofile"
    assert sorted(path.name for path in folder.glob("*.pstats")) == [
        "rank0.10.pstats", "rank0.14.pstats", "rank0.6.pstats",
    ]  # fmt: skip
    assert [path.name for path in (folder / "validate").glob("*.pstats")] == ["rank0.6.pstats"]
    calls = pstats.Stats(str(folder / "rank0.6.pstats")).stats  # type: ignore[attr-defined]
    assert {count for (_, _, name), (_, count, *_) in calls.items() if name == "training_step"} == {
        2
    }
    assert "cumulative" in (folder / "rank0.6.txt").read_text()
    assert sorted(stamp.batch for stamp, _ in profiler.saved_traces) == [6, 6, 10, 14]


def test_it_does_not_record_beside_a_profiler_of_the_same_hook(tmp_path: Path) -> None:
    """Batches of another profiler are left out, with one warning; in a Suite as well."""
    profilers: list[Any] = [VizTracer(schedule="first 4ba"), CProfile(schedule="first 2ba")]
    with pytest.warns(PerfWarning, match="missing from the traces of CProfile") as caught:
        trainer(tmp_path, Suite(profilers), logger=Records()).fit(Small())
    assert len(ours(caught)) == 1
    assert [len(each.saved_traces) for each in profilers] == [1, 0]


def test_its_arguments_are_checked() -> None:
    """The base class validates its arguments, and suggests the nearest of all."""
    with pytest.raises(ConfigError, match="nonsense"):
        CProfile(folder="{nonsense}")
    for wrong, near in {"filenam": "filename", "rank": "ranks", "tops": "top"}.items():
        problem = f"{wrong}=1 is not an option of CProfile. Did you mean {near}?"
        with pytest.raises(ConfigError, match=re.escape(problem)):
            CProfile(**{wrong: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CProfile, PyTorch, VizTracer, Memray, MemorySnapshot])
def test_yaml_and_signatures_have_the_arguments_of_every_profiler(kind: type) -> None:
    """They are passed on by ``**kwargs``: LightningCLI has them with type, default and help."""
    shared = signature(Profiler).parameters.keys() - {"kwargs"}
    own = signature(kind).parameters
    assert shared <= own.keys()
    parser = ArgumentParser()
    parser.add_class_arguments(kind, "it")
    found = {action.dest: action for action in parser._actions}
    for name in own.keys() - {"kwargs"}:
        action = found[f"it.{name}"]
        assert action.default == own[name].default
        assert action.help
    expected = {
        "ranks": "list[int], int, NoneType",
        "overwrite": "bool",
        "output_path_prefix": "str",
    }
    for name, types in expected.items():
        action = found[f"it.{name}"]
        assert types in str(getattr(action, "_typehint", action.type)), name


class Unfinished(CProfile):
    """`record` is not a generator."""

    def record(self, path: Path, context: RunContext, warmup: int) -> Any:
        """Without yield."""


class Undeclared(CProfile):
    """Returns a further file that has no name."""

    @property
    def further_files(self) -> dict[str, Names]:
        """None."""
        return {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unfinished, r"record\(\) is not a generator: yield between start and stop"),
        (Undeclared, "table is in Recorded.further, but not in further_files"),
    ],
)
def test_an_incomplete_profiler_is_off_and_says_why(
    tmp_path: Path, kind: Any, message: str
) -> None:
    """Training continues, and no hook is left."""
    with pytest.warns(PerfWarning, match=message):
        trainer(tmp_path, kind(schedule="first 2ba"), logger=Records()).fit(Small())
    assert not has_python_profiler()
