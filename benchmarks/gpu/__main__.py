"""Runs the parts, each in a separate process, and writes the table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS.parent / "tests"))

#: Seconds that a part may take.
LIMIT = 240


def run_part(name: str, device: str, rows: Path) -> None:
    """Run a part in this process, and write its rows to a file, one line each."""
    import logging

    from gpu.bench import Bench, Row
    from gpu.parts import PARTS

    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, rows.open("a", encoding="utf-8") as file:
        os.chdir(folder)
        bench = Bench(device, Path(folder))

        def write(row: Row) -> None:
            print(json.dumps(row.as_dict()), file=file, flush=True)

        try:
            for row in PARTS[name](bench):
                write(row)
        except Exception as error:
            traceback.print_exc()
            write(Row("the part ended", False, note=f"{type(error).__name__}: {error}"[:400]))
        if bench.warnings:
            write(Row("no warning of lightning_perf", False, note=str(bench.warnings)[:800]))


def rows_of(name: str, device: str) -> list[dict[str, Any]]:
    """Run a part in another process and return its rows, even if it crashes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.touch()
        command = [sys.executable, "-m", "gpu", "--part", name, "--device", device, "--rows"]
        trouble = ""
        try:
            env = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
            code = subprocess.run([*command, str(path)], env=env, timeout=LIMIT).returncode
            if code:
                trouble = f"exit code {code}"
        except subprocess.TimeoutExpired:
            trouble = f"took over {LIMIT} s"
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if trouble:
        found.append({"what": "the process ended", "ours": False, "reference": None,
                      "ratio": None, "outcome": "FAILED", "note": trouble})  # fmt: skip
    return found


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    def text(value: Any) -> str:
        plain = isinstance(value, bool | str) or value is None
        return "" if value is None else str(value) if plain else f"{value:.4g}"

    table = Table("part", "what", "ours", "reference", "ratio", "", "note")
    for part, content in results["parts"].items():
        for row in content["rows"]:
            values = [text(row[key]) for key in ("what", "ours", "reference", "ratio")]
            table.add_row(part, *values, row["outcome"], row["note"])
        table.add_section()
    Console(width=200).print(table)


def main() -> int:
    """Run the parts given on the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gpu")
    parser.add_argument("parts", nargs="*", help="parts to run; all by default")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results/gpu.json")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        run_part(given.part, given.device, given.rows)
        return 0
    from shared import save

    from gpu.parts import PARTS

    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results: dict[str, Any] = {"device": given.device, "parts": {}}
    if given.parts and given.out.exists():  # keep the other parts of an earlier run
        earlier = json.loads(given.out.read_text(encoding="utf-8"))
        if earlier["device"] == given.device:
            results["parts"] = earlier["parts"]
    for name in given.parts or PARTS:
        began = time.perf_counter()
        rows = rows_of(name, given.device)
        seconds = round(time.perf_counter() - began, 1)
        results["parts"][name] = {"seconds": seconds, "rows": rows}
        save(given.out, **results)
        failed = sum(row["outcome"] == "FAILED" for row in rows)
        print(f"{name}: {len(rows)} rows, {failed} failed, {seconds} s", flush=True)
    show(results)
    return int(any(r["outcome"] == "FAILED" for p in results["parts"].values() for r in p["rows"]))


if __name__ == "__main__":
    sys.exit(main())
