from __future__ import annotations

import inspect

from cuda_ops.bindings import Library
from cuda_ops.reference.calls import Reference


def test_it_has_the_calls_of_a_library() -> None:
    # A library can step some of the chunks only, and keep filled arguments.
    extra = {"chunks"}
    for name, function in inspect.getmembers(Reference, inspect.isfunction):
        other = inspect.signature(getattr(Library, name)).parameters
        assert set(inspect.signature(function).parameters) == other.keys() - extra, name
