"""Which of Lightning's tests are run, and why some are not: ``cases.txt``, read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

CASES = Path(__file__).with_name("cases.txt")


@dataclass
class Cases:
    """What is in the list.

    Attributes:
        files: Files of Lightning's ``tests`` folder.
        alone: Tests that start processes of their own and need a pytest for themselves.
        excluded: Beginning of a test's id -> the reason.
    """

    files: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)

    def reason(self, nodeid: str) -> str | None:
        """Return why a test is excluded, if it is."""
        for start, reason in self.excluded.items():
            if _names(start, nodeid):
                return reason
        return None

    def check(self, nodeids: Iterable[str]) -> None:
        """Check that every exclusion names a test.

        Raises:
            ValueError: Naming those that do not.
        """
        collected = list(nodeids)
        stale = [s for s in self.excluded if not any(_names(s, nodeid) for nodeid in collected)]
        if stale:
            raise ValueError(f"{CASES.name} excludes tests that are not there: {', '.join(stale)}")


def _names(start: str, nodeid: str) -> bool:
    name = nodeid.removeprefix("tests/")
    return name == start or name.startswith((f"{start}[", f"{start}::"))


def read_cases(path: Path = CASES) -> Cases:
    """Read the list.

    A line names a file. Lines below it, indented, name tests of it: ``- test # reason`` for one
    that is not run, ``+ test`` for one that is run in a process of its own.

    Raises:
        ValueError: If a line is something else.
    """
    cases = Cases()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text, _, reason = (part.strip() for part in line.partition(" #"))
        if not text or text.startswith("#"):
            continue
        sign, _, name = text.partition(" ")
        if not line.startswith(" "):
            cases.files.append(text)
        elif cases.files and sign == "-" and reason:
            cases.excluded[f"{cases.files[-1]}::{name}"] = reason
        elif cases.files and sign == "+":
            cases.alone.append(f"{cases.files[-1]}::{name}")
        else:
            raise ValueError(f"{path.name}, line {number}: {line!r} is no file and no test of one.")
    return cases
