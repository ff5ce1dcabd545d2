"""Every rule finds what is planted for it, and nothing where all is well."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.architecture import rules

LONG_BODY = "def f():\n" + "    x = 1\n" * 61
LONG_DOCSTRING = 'def f():\n    """' + "text\n" * 70 + '"""\n    return 1\n'


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.size_violations, "x = 1\n" * 401),
        (rules.size_violations, LONG_BODY),
        (rules.parameter_violations, "def f(a, b, c, d, *, e, f, g): ..."),
        (rules.parameter_violations, "def f(  # noqa: PLR0913\n    a, b, c, d, e, f, g): ..."),
        (rules.global_violations, "def f():\n    global x\n"),
        (rules.init_violations, "import os\nx = 1\n"),
        (rules.init_violations, "def f(): ..."),
        (rules.init_violations, "if TYPE_CHECKING:\n    x = 1\n"),
        (rules.init_violations, "from a import b, c\nb()\nc()\n"),
        (rules.private_import_violations, "from torch.distributed._tools import x"),
        (rules.private_import_violations, "def f():\n    from transformers.x import _y\n"),
        (rules.private_import_violations, "import torch._dynamo"),
        (rules.word_violations, "path = '/" + "home/me/data'"),
        (rules.word_violations, "# TO" + "DO: later"),
        (rules.word_violations, "# FIX" + "ME"),
        (rules.word_violations, "break" + "point()"),
    ],
)
def test_a_planted_violation_is_found(rule: Callable[[str], list[str]], text: str) -> None:
    assert rule(text)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.size_violations, "x = 1\n" * 400),
        (rules.size_violations, LONG_DOCSTRING),
        (rules.parameter_violations, "def f(self, a, b, c, *args, d, e, f, **kwargs): ..."),
        (rules.parameter_violations, "def f(  # noqa: PLR0913 why\n    a, b, c, d, e, f, g): ..."),
        (rules.init_violations, '"""Room."""\n'),
        (rules.init_violations, '"""P."""\nfrom a import b\n__all__ = ["b"]\nb()\n'),
        (rules.init_violations, "if TYPE_CHECKING:\n    import a\n__getattr__, __dir__ = f()\n"),
        (rules.private_import_violations, "from __future__ import annotations\nimport torch"),
        (rules.private_import_violations, "from goose_strategy._x import y"),
        (rules.word_violations, "/usr/bin/env, https://host.org/tmp/x, a/work/b, TODO(#12)"),
    ],
)
def test_what_is_allowed_passes(rule: Callable[[str], list[str]], text: str) -> None:
    assert rule(text) == []
