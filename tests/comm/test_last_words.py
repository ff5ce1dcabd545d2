"""What a rank writes before it ends."""

import io
import sys
import threading
import time

import pytest

from goose_strategy.comm.last_words import Cause, end_process, error_line, where
from tests.harness.world import run_ranks

CAUSE = Cause(
    rank=5,
    place="rank 5 (pp 1, dp 0, tp 1)",
    what="backward",
    stage=1,
    microbatch=3,
    error="ValueError: no",
    details="Traceback\n  line",
)


def test_a_cause_survives_the_store():
    assert Cause.from_json(CAUSE.to_json().encode()) == CAUSE
    assert CAUSE.describe() == (
        "rank 5 (pp 1, dp 0, tp 1) in 'backward' (stage 1, microbatch 3): ValueError: no"
    )


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (("step", None, None), "'step'"),
        (("step", 0, None), "'step' (stage 0)"),
        (("step", 1, 0), "'step' (stage 1, microbatch 0)"),
    ],
)
def test_numbers_that_are_unknown_are_left_out(place, text):
    assert where(*place) == text


def test_an_error_is_one_line():
    assert error_line(ValueError("first\nsecond")) == "ValueError: first"


def _ends(ctx, stderr, stacks):
    if stderr == "a string":
        sys.stderr = io.StringIO()
    elif stderr == "none":
        sys.stderr = sys.__stderr__ = None
    threading.Thread(target=time.sleep, args=(60,), name="sleeper").start()
    print("printed before", end="")
    end_process(["who and why"], stacks=stacks)
    print("never")


@pytest.mark.parametrize(
    ("stderr", "stacks"), [("usual", True), ("usual", False), ("a string", True), ("none", True)]
)
def test_the_process_ends_at_once_and_says_why(stderr, stacks):
    (death,) = run_ranks(_ends, 1, stderr, stacks, isolated=True, expect_death=[0])
    assert death.exit_code == 1
    assert death.after_s < 30
    assert "who and why" in death.output
    assert ("Thread 0x" in death.output) == stacks
    assert "printed before" in death.output
    assert "never" not in death.output
