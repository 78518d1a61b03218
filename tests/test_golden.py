"""Golden tests: keys, steps, files, warnings and params of whole training runs.

Each variant is 40 batches of a tiny model (or one stage by itself), described by one file of
``tests/golden``, with a line per key, file, warning and param. When behaviour changes on purpose,
rewrite the files and review the diff::

    LIGHTNING_PERF_UPDATE_GOLDEN=1 pytest tests/test_golden.py

The package must be installed (``pip install -e .``): its version is among the params. How the
values are described:

- ``exact``: counts, which are the same on each machine, with their value or values;
- ``zero``, ``int``, ``fraction`` (0 to 1), ``float``, ``negative``, ``nan``: all others, by what
  holds for every value of the key; seconds are ``float``, since load may make them larger than 1;
- ``rank``: the number of a rank, or a value that depends on it, which varies between runs;
- ``machine``: what the hardware does; of the steps only the last, since the clock decides whether
  there is a sample earlier. Keys in `SENSORS` may be absent, and are never in the files.

Of a run's own names, numbers and times, placeholders are left. `helpers/golden.py` has the runs.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
UPDATE = os.environ.get("LIGHTNING_PERF_UPDATE_GOLDEN") == "1"
SECONDS = 180.0

PROFILERS = ("pytorch", "viztracer", "memray", "memory_snapshot")
CALLBACKS = (
    "speed_monitor",
    "flops",
    "timings",
    "system_metrics",
    *PROFILERS,
    "suite",
    "suite_pytorch",
)
#: Sections map names to descriptions, or only list names.
Golden = dict[str, dict[str, Any] | list[str]]
Variant = dict[str, Any]


def variant(callbacks: str, **changes: Any) -> Variant:
    """The arguments of a run; a stage other than fit, loggers and ranks are changes."""
    defaults = {"stage": "fit", "accumulate": 1, "ranks": 1, "logger": True, "mlflow": False}
    return {"callbacks": callbacks, **defaults, **changes}


VARIANTS: dict[str, Variant] = {
    **{
        f"{name}.accumulate{accumulate}.ranks{ranks}": variant(
            name, accumulate=accumulate, ranks=ranks
        )
        for ranks in (1, 2)
        for accumulate in (1, 2)
        for name in CALLBACKS
        # The effect of accumulation on profilers is covered by `PyTorch`.
        if accumulate == 1 or name not in PROFILERS or (name, ranks) == ("pytorch", 1)
    },
    **{
        f"suite.{stage}": variant("suite", stage=stage) for stage in ("validate", "test", "predict")
    },
    "suite_pytorch.mlflow": variant("suite_pytorch", mlflow=True),
    "suite_pytorch.no_logger": variant("suite_pytorch", logger=False),
}

# -- descriptions ---------------------------------------------------------------------------------

#: Counts of the model, the same on each machine.
EXACT = re.compile(
    r"(.*/)?(epoch|batch_flops(_from_formula)?|total_flops|max_batches_per_sec"
    r"|(un)?tracked_operations)"
)
MACHINE = re.compile(r"(system/node_\d+|memory)/.*")
#: Keys that exist on some machines only.
SENSORS = re.compile(
    r"system/node_\d+/(gpu_\d+/\w+|disk_(iops|throughput_(read|write))|cpu_iowait|swap_used"
    r"|net_throughput_(sent|recv))"
    r"|memory/(max_over_ranks/)?((current|peak)_(allocated|active|inactive|reserved)_mem"
    r"|alloc_retries)"
)
CLOCK = re.compile(r"(.*/)?(timings|time)/.*")
RANK = re.compile(r".*/slowest_rank|straggler/.*")
#: Params whose value depends on the machine or the release.
OTHERS_PARAMS = re.compile(r".*/(version|device)")


def kind(key: str, values: list[float]) -> str:
    """The kind that describes all values of a key."""
    if MACHINE.fullmatch(key):
        return "machine"
    if any(map(math.isnan, values)):
        return "nan"
    if RANK.fullmatch(key):
        return "rank"
    if min(values) < 0:
        return "negative"
    if not any(values):
        return "zero"
    if all(map(float.is_integer, values)):
        return "int"
    return "fraction" if max(values) <= 1 and not CLOCK.fullmatch(key) else "float"


def entry(key: str, points: list[tuple[int | None, float]]) -> dict[str, Any]:
    """The entry of a key: its kind, its steps, and its values if they are exact."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    if EXACT.fullmatch(key):
        same = {"value": values[0]} if len(set(values)) == 1 else {"values": values}
        return {"kind": "exact", **same, "steps": steps}
    found = kind(key, values)
    return {"kind": found, "steps": ["...", steps[-1]] if found == "machine" else steps}


def described(points: Iterable[tuple[str, int | None, float]]) -> dict[str, Any]:
    """All keys except sensors that another machine may lack."""
    found: dict[str, list[tuple[int | None, float]]] = {}
    for key, step, value in points:
        if not SENSORS.fullmatch(key):
            found.setdefault(key, []).append((step, value))
    return {key: entry(key, found[key]) for key in found}


def read(folder: Path) -> Golden:
    """Read the output of a run, without parts that differ in each run."""
    events = [
        {"pid": int(file.stem), **json.loads(line)}
        for file in sorted((folder / "events").iterdir())
        for line in file.read_text().splitlines()
    ]
    ranks = {each["pid"]: each["rank"] for each in events if each["event"] == "rank"}
    of: dict[str, list[dict[str, Any]]] = {}
    for each in events:
        rank = ranks.get(each["pid"], 0)
        of.setdefault(each["event"], []).append({"by": f"rank {rank}: " if rank else "", **each})
    found: dict[str, Any] = {
        "checkpoint": [line for each in of.get("checkpoint", []) for line in state(each)],
        "files": list(files(folder, ranks)),
        "logged": described(
            (each["by"] + key, each["step"], value)
            for each in of.get("metrics", [])
            for key, value in each["metrics"].items()
        ),
        "params": {k: v for each in of.get("params", []) for k, v in each["params"].items()},
        "warnings": [warning(each, folder) for each in of.get("warning", [])],
    }
    for each in of.get("mlflow", []):
        points = of.get("mlflow_metric", [])
        found["mlflow_artifacts"] = [unnamed(path, ranks) for path in each["artifacts"]]
        found["mlflow_metrics"] = described((p["key"], p["step"], p["value"]) for p in points)
        params = json.loads(each["params"]["lightning_perf"])
        machine = {"version": "", "device": ""}
        found["mlflow_params"] = each["params"] | {"lightning_perf": json.dumps(params | machine)}
        theirs = re.compile(r"mlflow\.(source|user)")
        found["mlflow_tags"] = [tag for tag in each["tags"] if not theirs.match(tag)]
    return {section: tidy(content) for section, content in sorted(found.items())}


def warning(event: dict[str, Any], folder: Path) -> str:
    """A warning without its numbers and without the test's folder."""
    text = re.sub(r"\d+", "N", event["text"].replace(str(folder), "{folder}"))
    return f"{event['by']}{event['category']}: {text}"


def state(event: dict[str, Any]) -> Iterator[str]:
    """The names in each callback's state; states of stages have the same names in all of them."""
    for owner, paths in event["callbacks"].items():
        stage = re.compile(r"\b(train|validate|test|predict)/")
        yield from {f"{owner}: {stage.sub('{stage}/', path)}" for path in paths}


def tidy(content: dict[str, Any] | list[str]) -> dict[str, Any] | list[str]:
    """Sorted by name, without values that depend on the machine."""
    if isinstance(content, list):
        return sorted(content)
    hidden = {key: "{machine}" for key in content if OTHERS_PARAMS.fullmatch(key)}
    return dict(sorted({**content, **hidden}.items()))


def files(folder: Path, pids: dict[int, int]) -> Iterator[str]:
    """All files of a run: below its root, in its working folder, and temporary files."""
    for root in ("out", "cwd", "tmp"):
        for path in (folder / root).rglob("*"):
            if not path.is_dir():
                yield unnamed(path.relative_to(folder).as_posix(), pids)


def unnamed(path: str, pids: dict[int, int]) -> str:
    """A path without names, numbers and times of its run."""
    for pid in pids:
        path = re.sub(rf"(?<!\d){pid}(?!\d)", "{pid}", path)
    path = re.sub(r"\d{8}-\d{6}\.\d{3}-", "{time}-", path)
    return re.sub(r"golden-(version_7|run)\b|run-\d{8}-\d{6}-[0-9a-f]{4}", "{run_name}", path)


# -- files and their differences -----------------------------------------------------------------


def write(path: Path, golden: Golden) -> None:
    """One line per name, so that the change of a name is a diff of one line."""
    sections = []
    for section, content in golden.items():
        opening, closing = ("[", "]") if isinstance(content, list) else ("{", "}")
        lines = (
            [json.dumps(each) for each in content]
            if isinstance(content, list)
            else [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        )
        body = "".join(f"\n    {line}," for line in lines)[:-1]
        end = "\n  " if lines else ""
        sections.append(f"  {json.dumps(section)}: {opening}{body}{end}{closing}")
    path.write_text("{\n" + ",\n".join(sections) + "\n}\n")


def differences(before: Golden, now: Golden) -> list[str]:
    """One line for each name that was added, removed or changed."""
    found = []
    for section in sorted(before.keys() | now.keys()):
        old, new = (golden.get(section, {}) for golden in (before, now))
        if isinstance(old, list) or isinstance(new, list):
            gone, came = Counter(old) - Counter(new), Counter(new) - Counter(old)
            found += [f"{section}: gone     {name}" for name in gone.elements()]
            found += [f"{section}: new      {name}" for name in came.elements()]
            continue
        found += [f"{section}: gone     {key}  {old[key]}" for key in old if key not in new]
        found += [f"{section}: new      {key}  {new[key]}" for key in new if key not in old]
        both = [key for key in old if key in new and old[key] != new[key]]
        found += [f"{section}: changed  {key}  {change(old[key], new[key])}" for key in both]
    return found


def change(old: Any, new: Any) -> str:
    """Describe the change of one name."""
    if isinstance(old, list) and isinstance(new, list):
        return added_and_removed(old, new)
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{old!r} -> {new!r}"
    parts = []
    for part in sorted(old.keys() | new.keys()):
        was, now = old.get(part), new.get(part)
        if was != now and isinstance(was, list) and isinstance(now, list) and part == "steps":
            parts.append(f"steps {added_and_removed(was, now)}")
        elif was != now:
            parts.append(f"{part} {was} -> {now}")
    return "; ".join(parts)


def added_and_removed(old: list[Any], new: list[Any]) -> str:
    """The elements of a list that were added and removed."""
    gone, came = ((Counter(a) - Counter(b)).elements() for a, b in ((old, new), (new, old)))
    return f"gone {list(gone)}, new {list(came)}"


# -- tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Runs a variant in a separate process; returns the folder with its output."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }
    folder = tmp_path_factory.mktemp("golden")
    with (
        (folder / "server.txt").open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(HERE / "helpers" / "golden.py")],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as server,
    ):
        requests, answers = server.stdin, server.stdout
        assert requests is not None
        assert answers is not None

        def start(name: str) -> Path:
            request = {"folder": str(folder / name), **VARIANTS[name]}
            print(json.dumps(request), file=requests, flush=True)
            answered = select.select([answers], [], [], SECONDS)[0]
            code = answers.readline().strip() if answered else "no answer"
            log = folder / name / "log.txt"
            said = log if log.exists() else folder / "server.txt"
            assert code == "0", f"exit code {code}:\n{said.read_text()[-3000:]}"
            return folder / name

        yield start
        requests.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_matches_its_golden_file(run: Callable[[str], Path], name: str) -> None:
    """Keys, steps, kinds, exact values, files, warnings and params are those of the file."""
    found = read(run(name))
    path = GOLDEN / f"{name}.json"
    failed = [text for text in found["warnings"] if "Please report this" in text]
    assert not failed, "a callback failed, which is nothing to keep:\n" + "\n".join(failed)
    if UPDATE:
        GOLDEN.mkdir(exist_ok=True)
        write(path, found)
        return
    changes = differences(json.loads(path.read_text()), json.loads(json.dumps(found)))
    parts = "\n".join(changes)
    assert not changes, (
        f"{path.name} differs from this run:\n{parts}\n"
        "If that is meant: LIGHTNING_PERF_UPDATE_GOLDEN=1 pytest tests/test_golden.py"
    )


def test_each_golden_file_has_its_run() -> None:
    """A renamed or removed variant leaves no golden file behind."""
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(VARIANTS)


def test_differences_name_additions_and_removals(tmp_path: Path) -> None:
    """A removed key, an added step and a renamed file are one line each."""
    before: Golden = {
        "files": ["out/a.json"],
        "logged": {"a": {"kind": "float", "steps": [4, 9]}, "b": {"kind": "zero", "steps": [4]}},
    }
    now: Golden = {
        "files": ["out/b.json"],
        "logged": {"a": {"kind": "float", "steps": [4, 9, 9]}},
    }
    write(tmp_path / "before.json", before)
    assert json.loads((tmp_path / "before.json").read_text()) == before
    assert differences(before, before) == []
    assert differences(before, now) == [
        "files: gone     out/a.json",
        "files: new      out/b.json",
        "logged: gone     b  {'kind': 'zero', 'steps': [4]}",
        "logged: changed  a  steps gone [], new [9]",
    ]
