"""What the package showed before: keys, steps, files, warnings and params of whole training runs.

Each variant is 40 batches of a tiny model (or one stage by itself), described by one file of
``tests/golden``, with a line per key, file, warning and param. When behaviour changes on purpose,
rewrite the files and review the diff::

    LIGHTNING_PERF_UPDATE_GOLDEN=1 pytest tests/test_golden.py

The package must be installed (``pip install -e .``): its version is among the params. How the
values are described:

- ``exact``: counts, which are the same on each machine, with their value or values;
- ``zero``, ``int``, ``fraction`` (0 to 1), ``float``, ``negative``, ``nan``: all others, by what
  holds for every value of the key; seconds are ``float``, since load may make them larger than 1;
- ``rank``: the number of a rank, which one is a matter of chance;
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
UPDATE = os.environ.get("LIGHTNING_PERF_UPDATE_GOLDEN") == "1"
SECONDS = 180.0

CALLBACKS = (
    "speed_monitor", "flops", "timings", "system_metrics", "pytorch", "viztracer", "memray",
    "memory_snapshot", "suite", "suite_pytorch",
)  # fmt: skip
#: Whatever the sections hold: names with what is known of them, or names alone.
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
    },
    **{
        f"suite.{stage}": variant("suite", stage=stage) for stage in ("validate", "test", "predict")
    },
    "suite_pytorch.mlflow": variant("suite_pytorch", mlflow=True),
    "suite_pytorch.no_logger": variant("suite_pytorch", logger=False),
}

# -- what is described how -----------------------------------------------------------------------

#: Counts of the model, the same on each machine.
EXACT = re.compile(
    r"(.*/)?(epoch|batch_flops(_from_formula)?|total_flops|max_batches_per_sec"
    r"|(un)?tracked_operations)"
)
MACHINE = re.compile(r"(system/node_\d+|memory)/.*")
#: Keys that only some machines have.
SENSORS = re.compile(
    r"system/node_\d+/(gpu_\d+/\w+|disk_(iops|throughput_(read|write))|cpu_iowait|swap_used"
    r"|net_throughput_(sent|recv))"
    r"|memory/(max_over_ranks/)?((current|peak)_(allocated|active|inactive|reserved)_mem"
    r"|alloc_retries)"
)
CLOCK = re.compile(r"(.*/)?(timings|time)/.*")
RANK = re.compile(r".*/slowest_rank")
#: Params whose value is the machine's or the release's.
OTHERS_PARAMS = re.compile(r".*/(version|device)")


def kind(key: str, values: list[float]) -> str:
    """What holds for all values of a key."""
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
    """What is kept of one key: its kind, its steps, and its values where they are exact."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    if EXACT.fullmatch(key):
        same = {"value": values[0]} if len(set(values)) == 1 else {"values": values}
        return {"kind": "exact", **same, "steps": steps}
    found = kind(key, values)
    return {"kind": found, "steps": ["...", steps[-1]] if found == "machine" else steps}


def described(points: dict[str, list[tuple[int | None, float]]]) -> dict[str, Any]:
    """All keys but those of sensors that another machine may not have."""
    return {key: entry(key, points[key]) for key in points if not SENSORS.fullmatch(key)}


def read(folder: Path) -> Golden:
    """What a run left in its folder, without what is another one each time."""
    events = [
        (int(file.stem), json.loads(line))
        for file in sorted((folder / "events").iterdir())
        for line in file.read_text().splitlines()
    ]
    ranks = {pid: event["rank"] for pid, event in events if event["event"] == "rank"}
    logged: dict[str, list[tuple[int | None, float]]] = {}
    mlflow: dict[str, list[tuple[int | None, float]]] = {}
    found: dict[str, Any] = {"warnings": [], "params": {}, "checkpoint": []}
    for pid, event in events:
        rank = ranks.get(pid, 0)
        prefix = f"rank {rank}: " if rank else ""
        match event["event"]:
            case "metrics":
                for key, value in event["metrics"].items():
                    logged.setdefault(prefix + key, []).append((event["step"], value))
            case "mlflow_metric":
                mlflow.setdefault(event["key"], []).append((event["step"], event["value"]))
            case "params":
                found["params"] |= event["params"]
            case "warning":
                text = re.sub(r"\d+", "N", event["text"].replace(str(folder), "{folder}"))
                found["warnings"].append(f"{prefix}{event['category']}: {text}")
            case "checkpoint":
                for owner, paths in event["callbacks"].items():
                    found["checkpoint"] += [f"{owner}: {path}" for path in folded(paths)]
            case "mlflow":
                found["mlflow_params"] = event["params"]
                theirs = re.compile(r"mlflow\.(source|user)")
                found["mlflow_tags"] = [tag for tag in event["tags"] if not theirs.match(tag)]
                found["mlflow_artifacts"] = [unnamed(path, ranks) for path in event["artifacts"]]
    found |= {"logged": described(logged), "files": list(files(folder, ranks))}
    if mlflow:
        found["mlflow_metrics"] = described(mlflow)
    return {section: tidy(content) for section, content in sorted(found.items())}


def tidy(content: dict[str, Any] | list[str]) -> dict[str, Any] | list[str]:
    """In the order of names, without the values of the machine."""
    if isinstance(content, list):
        return sorted(content)
    hidden = {key: "{machine}" for key in content if OTHERS_PARAMS.fullmatch(key)}
    return dict(sorted({**content, **hidden}.items()))


def folded(paths: list[str]) -> list[str]:
    """The names in a callback's state; the stages have all the same."""
    return sorted({re.sub(r"\b(train|validate|test|predict)/", "{stage}/", path) for path in paths})


def files(folder: Path, pids: dict[int, int]) -> Iterator[str]:
    """All files that a run left: below its root, in its working folder, and temporary ones."""
    for root in ("out", "cwd", "tmp"):
        for path in (folder / root).rglob("*"):
            if not path.is_dir():
                yield unnamed(path.relative_to(folder).as_posix(), pids)


def unnamed(path: str, pids: dict[int, int]) -> str:
    """A path without the names, numbers and times of its run."""
    for pid in pids:
        path = re.sub(rf"(?<!\d){pid}(?!\d)", "{pid}", path)
    return re.sub(r"golden-(version_7|run)\b|run-\d{8}-\d{6}-[0-9a-f]{4}", "{run_name}", path)


# -- files and their differences -----------------------------------------------------------------


def write(path: Path, golden: Golden) -> None:
    """One line per name, so that a change of one is a diff of one line."""
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
    """A line for each name that came, went or changed."""
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
    """What became of one name."""
    if isinstance(old, list) and isinstance(new, list):
        return came_and_went(old, new)
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{old!r} -> {new!r}"
    told = []
    for part in sorted(old.keys() | new.keys()):
        was, now = old.get(part), new.get(part)
        if was != now and part == "steps":
            told.append(f"steps {came_and_went(was, now)}")
        elif was != now:
            told.append(f"{part} {was} -> {now}")
    return "; ".join(told)


def came_and_went(old: list[Any], new: list[Any]) -> str:
    """Which elements of a list came, and which went."""
    gone, came = ((Counter(a) - Counter(b)).elements() for a, b in ((old, new), (new, old)))
    return f"gone {list(gone)}, new {list(came)}"


# -- tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Runs a variant in a process of its own; gives the folder with what it left."""
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
        assert server.stdin is not None
        assert server.stdout is not None

        def start(name: str) -> Path:
            print(json.dumps({"folder": str(folder / name), **VARIANTS[name]}), file=server.stdin)
            server.stdin.flush()
            answered = select.select([server.stdout], [], [], SECONDS)[0]
            code = server.stdout.readline().strip() if answered else "no answer"
            log = folder / name / "log.txt"
            said = log if log.exists() else folder / "server.txt"
            assert code == "0", f"exit code {code}:\n{said.read_text()[-3000:]}"
            return folder / name

        yield start
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if each["ranks"] > 1 else [])
        for name, each in VARIANTS.items()
    ],
)
def test_a_run_shows_what_it_showed(run: Callable[[str], Path], name: str) -> None:
    """Keys, steps, kinds, exact values, files, warnings and params are those of the golden file."""
    found = read(run(name))
    path = GOLDEN / f"{name}.json"
    failed = [text for text in found["warnings"] if "Please report this" in text]
    assert not failed, "a callback failed, which is nothing to keep:\n" + "\n".join(failed)
    if UPDATE:
        GOLDEN.mkdir(exist_ok=True)
        write(path, found)
        return
    changes = differences(json.loads(path.read_text()), json.loads(json.dumps(found)))
    told = "\n".join(changes)
    assert not changes, (
        f"{path.name} differs from this run:\n{told}\n"
        "If that is meant: LIGHTNING_PERF_UPDATE_GOLDEN=1 pytest tests/test_golden.py"
    )


def test_each_golden_file_has_its_run() -> None:
    """A variant that is renamed or removed leaves no file behind."""
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(VARIANTS)


def test_differences_name_what_came_and_went(tmp_path: Path) -> None:
    """A key that goes, a step that comes and a file that is renamed are one line each."""
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
