"""What to write for changes that help: lines, a YAML file for LightningCLI, and a patch."""

from __future__ import annotations

import ast
from difflib import unified_diff
from io import StringIO
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lightning_perf.trials.experiment import Candidate

#: The arguments of a DataLoader by position; a Trainer has none.
_POSITIONS = (
    "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn",
    "pin_memory",
)  # fmt: skip
#: Functions whose data are not those of the training.
_OTHER_DATA = ("val_dataloader", "test_dataloader", "predict_dataloader")
#: What a patch says after a last line that has no end.
_NO_END = "\\ No newline at end of file\n"
#: The classes whose arguments changes set, by the field of a `Candidate`.
_CLASSES = {"trainer": "Trainer", "loader": "DataLoader"}


def lines(changes: Sequence[Candidate]) -> list[str]:
    """The lines to write in a script, as arguments of one call per class.

    Example:
        >>> from lightning_perf.trials.experiment import Candidate
        >>> fixed = ("Workers", 2, "num_workers=2", "input", True, [], None, 1)
        >>> lines([Candidate(*fixed, trainer={}, loader={"num_workers": 2}, code="", yaml=[])])
        ['DataLoader(..., num_workers=2)']
    """
    found = []
    for field, name in _CLASSES.items():
        given = _arguments(changes, field)
        if given:
            text = ", ".join(f"{key}={value!r}" for key, value in given.items())
            found.append(f"{name}(..., {text})")
    return found + [line for each in changes for line in each.code.splitlines()]


def _arguments(changes: Sequence[Candidate], field: str) -> dict[str, Any]:
    return {key: value for each in changes for key, value in getattr(each, field).items()}


def as_yaml(changes: Sequence[Candidate]) -> str:
    """The file for LightningCLI's ``--config``, after those of the training.

    What is not known to be an argument of the Trainer, the data or the model is in comments.
    """
    content: dict[str, Any] = {}
    rest = []
    for change in changes:
        named = {path[-1] for path, _ in change.yaml}
        missing = {key: value for key, value in change.loader.items() if key not in named}
        for key, value in missing.items():
            rest.append(f"# In the code: DataLoader(..., {key}={value!r})")
        # Half of a change would be another training.
        is_half = bool(missing and change.trainer)
        if is_half:
            rest += [f"# With it: Trainer(..., {key}={v!r})" for key, v in change.trainer.items()]
        for path, value in [] if is_half else change.yaml:
            here = content
            for name in path[:-1]:
                here = here.setdefault(name, {})
            here[path[-1]] = value
        lines = (line.removeprefix("# ") for line in change.code.splitlines())
        rest += [f"# In the code: {line}" for line in lines]
    return "\n".join([*rest, yaml.safe_dump(content, sort_keys=False)])


def patch(source: str, name: str, changes: Sequence[Candidate]) -> str:
    r"""A unified diff of a script that sets the arguments of changes.

    Empty where there is a doubt: no call or several calls of a class, or an argument that is not a
    literal. Half of the changes are not made. Nothing is written.

    Example:
        >>> from lightning_perf.trials.experiment import Candidate
        >>> fixed = ("Workers", 2, "num_workers=2", "input", True, [], None, 1)
        >>> change = Candidate(*fixed, trainer={}, loader={"num_workers": 2}, code="", yaml=[])
        >>> print(patch("DataLoader(data, num_workers=0)\n", "train.py", [change]), end="")
        --- a/train.py
        +++ b/train.py
        @@ -1 +1 @@
        -DataLoader(data, num_workers=0)
        +DataLoader(data, num_workers=2)
    """
    new = source
    for field, kind in _CLASSES.items():
        if given := _arguments(changes, field):
            new = _with_arguments(new, kind, given)
    if not new:
        return ""
    # Lines end at line feeds alone, as in the parser of Python and in git.
    end = "\t" if " " in name else ""  # as diff writes it: a name may end at a space
    names = f"a/{name}{end}", f"b/{name}{end}"
    diff = unified_diff([*StringIO(source)], [*StringIO(new)], *names)
    ended = (line if line.endswith("\n") else f"{line}\n{_NO_END}" for line in diff)
    return "".join(ended)


def _with_arguments(source: str, kind: str, given: Mapping[str, Any]) -> str:
    """A source in which the one call of a class has some arguments; empty if there is a doubt."""
    try:
        call = _only_call(tree := ast.parse(source), kind)
        edits = list(_edits(source, call, given)) if call else []
        if call is None or not edits:
            return ""
        new = source
        for start, end, text in sorted(edits, reverse=True):
            new = new[:start] + text + new[end:]
        # Checked against what is meant: parentheses around an argument, for one, are in no node.
        keywords = {each.arg: each for each in call.keywords}
        keywords |= {key: ast.keyword(key, ast.Constant(value)) for key, value in given.items()}
        call.keywords = list(keywords.values())
        return new if ast.dump(tree) == ast.dump(ast.parse(new)) else ""
    except (SyntaxError, ValueError, IndexError):  # the last one with other ends of lines
        return ""


def _only_call(tree: ast.AST, kind: str) -> ast.Call | None:
    """The one call of a class, those that load other data than the training's left out."""
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))
    others = [each for each in functions if each.name in _OTHER_DATA]
    apart = {call for each in others for call in _calls(each, kind)}
    calls = [call for call in _calls(tree, kind) if call not in apart]
    return calls[0] if len(calls) == 1 else None


def _calls(tree: ast.AST, kind: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            # DataLoader[...](...) has the name below a subscript.
            function = function.value if isinstance(function, ast.Subscript) else function
            if getattr(function, "attr", getattr(function, "id", None)) == kind:
                yield node


def _edits(
    source: str, call: ast.Call, arguments: Mapping[str, Any]
) -> Iterator[tuple[int, int, str]]:
    """Replacements in a source, as positions of characters, for arguments of a call."""
    keywords = {each.arg: each.value for each in call.keywords}
    fixed = [value for name, value in keywords.items() if name in arguments]
    # **options and *args may have the argument, too.
    unclear = None in keywords or any(isinstance(each, ast.Starred) for each in call.args)
    by_position = set(_POSITIONS[: len(call.args)]) & set(arguments)
    if unclear or by_position or not all(isinstance(value, ast.Constant) for value in fixed):
        return
    added = []
    for name, value in arguments.items():
        if (old := keywords.get(name)) is None:
            added.append(f"{name}={value!r}")
        else:
            yield *_span(source, old), repr(value)
    if added:
        ends = [_span(source, each)[1] for each in (*call.args, *keywords.values())]
        end = max(ends, default=_span(source, call)[1] - 1)
        yield end, end, (", " if ends else "") + ", ".join(added)


def _span(source: str, node: ast.expr) -> tuple[int, int]:
    """The characters of a node; `ast` counts bytes of lines."""
    text = source.split("\n")

    def position(line: int, column: int) -> int:
        before = sum(len(each) + 1 for each in text[: line - 1])
        return before + len(text[line - 1].encode()[:column].decode())

    end = (node.end_lineno or 0), (node.end_col_offset or 0)
    return position(node.lineno, node.col_offset), position(*end)
