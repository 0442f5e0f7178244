"""INFO lines are shown during a run where the program has no logging of its own, and nothing stays behind."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from jaxlightning.utilities.run_messages import shown_messages

SCRIPT = """
import logging
from jaxlightning.utilities.rank_zero import rank_zero_info
from jaxlightning.utilities.run_messages import shown_messages
{setup}
rank_zero_info("before")
with shown_messages():
    {within}
    rank_zero_info("within")
rank_zero_info("after")
log = logging.getLogger("jaxlightning")
print(log.handlers, log.level, log.propagate)
"""


@pytest.mark.parametrize(
    ("setup", "within", "shown"),
    [
        ("", "", "within\n"),
        ("", "logging.basicConfig()", "within\n"),
        ("from absl import logging as absl; absl.vlog(9, 'a run before')", "", "within\n"),
        ("logging.basicConfig(level=logging.ERROR)", "", ""),
        ("logging.basicConfig(format='%(message)s')", "", ""),
        ("logging.getLogger('jaxlightning').setLevel(logging.WARNING)", "", ""),
    ],
)
def test_lines_are_shown_within_only_and_never_against_the_programs_own_setting(
    setup: str, within: str, shown: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(setup=setup, within=within or "pass")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == shown
    assert done.stdout.startswith("[] ")
    assert done.stdout.endswith(" True\n")


def test_an_exception_leaves_the_logger_as_it_was() -> None:
    log = logging.getLogger("jaxlightning")
    before = (list(log.handlers), log.level, log.propagate)
    with pytest.raises(KeyError), shown_messages():
        raise KeyError
    assert (log.handlers, log.level, log.propagate) == before
