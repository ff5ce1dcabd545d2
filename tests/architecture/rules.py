"""Rules on source text, as functions from text to a list of violations.

ruff counts statements and branches; it knows no length of files or bodies, no rule for
``__init__.py``, and nothing about where private APIs may be used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("goose_strategy", "cuda_ops")

MAX_FILE_LINES = 400
MAX_BODY_LINES = 60
MAX_PARAMS = 6

FOREIGN = ("torch", "transformers", "lightning", "pytorch_lightning", "datasets")

_Function = ast.FunctionDef | ast.AsyncFunctionDef

# Paths that exist on one machine only, and notes that were never followed up.
_FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.:~}/-])/(home|root|mnt|opt|work|tmp)/\w"),
    "a note without an issue": re.compile(r"\b(FIXME|XXX|HACK|WIP)\b|\bTODO(?!\(#)"),
    "a debugger": re.compile(r"\b(breakpoint\(\)|set_trace\(\)|import i?pdb)"),
}


def python_files(*folders: str) -> list[Path]:
    """Return all Python files below the given folders of the repository, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a path relative to the repository, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def size_violations(text: str) -> list[str]:
    """Return what is too long: the file, or the body of a function without its docstring."""
    lines = len(text.splitlines())
    found = [f"{lines} lines, more than {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for function in _functions(text):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        length = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
        if length > MAX_BODY_LINES:
            found.append(f"{function.name}: a body of {length} lines, more than {MAX_BODY_LINES}")
    return found


def parameter_violations(text: str) -> list[str]:
    """Return functions with too many parameters; ``self``, ``*`` and ``**`` are not counted.

    A ``noqa: PLR0913`` on the ``def`` line, which stands with its reason, excuses a function.
    """
    found = []
    lines = text.splitlines()
    for function in _functions(text):
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMS and "noqa: PLR0913 " not in lines[function.lineno - 1]:
            found.append(f"{function.name}: {count} parameters, more than {MAX_PARAMS}")
    return found


def global_violations(text: str) -> list[str]:
    """Return every ``global`` statement."""
    nodes = ast.walk(ast.parse(text))
    return [f"line {node.lineno}: global" for node in nodes if isinstance(node, ast.Global)]


def init_violations(text: str) -> list[str]:
    """Return what an ``__init__.py`` holds beyond imports, ``__all__`` and one registration call.

    ``if TYPE_CHECKING`` with imports, and the assignment of a module's ``__getattr__`` and
    ``__dir__``, count as imports.
    """
    found = []
    calls = 0
    for node in ast.parse(text).body:
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        calls += is_call
        if not (is_call or _is_docstring(node) or _is_export(node)):
            found.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found + ([f"{calls} calls, more than 1"] if calls > 1 else [])


def private_import_violations(text: str) -> list[str]:
    """Return imports of private modules or names of other packages."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names if not node.level]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        else:
            continue
        found += [f"line {node.lineno}: {path}" for path in paths if _is_private(path)]
    return found


def word_violations(text: str) -> list[str]:
    """Return lines with words that do not belong into a public repository."""
    return [
        f"line {number}: {what}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in _FORBIDDEN.items()
        if pattern.search(line)
    ]


def _functions(text: str) -> Iterator[_Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _Function):
            yield node


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_export(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return all(_is_export(inner) for inner in node.body) and not node.orelse
    if not isinstance(node, ast.Assign):
        return False
    names = {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
    return names <= {"__all__", "__getattr__", "__dir__", "__version__"}


def _is_private(path: str) -> bool:
    package, *rest = path.split(".")
    return package in FOREIGN and any(
        part.startswith("_") and not part.startswith("__") for part in rest
    )
