"""The modules of the schedule package import each other in one direction."""

import ast
from pathlib import Path

from lightning_perf import schedule

#: From the bottom up.
ORDER = ["base", "intervals", "parse", "cycles", "conditions", "triggers", "__init__"]


def test_imports_follow_the_order_of_modules():
    """All imports, also inside functions, point downward; only combining parses strings."""
    package, upward = Path(schedule.__file__).parent, []
    assert {path.stem for path in package.glob("*.py")} == set(ORDER)
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            name = module.removeprefix("lightning_perf.schedule.")
            if name != module and ORDER.index(name) >= ORDER.index(path.stem):
                upward.append((path.stem, name))
    assert upward == [("base", "parse")]
