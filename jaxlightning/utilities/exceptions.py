"""Exceptions that the trainer raises and that users may catch."""

from __future__ import annotations


class MisconfigurationException(Exception):
    """The trainer, the module or a callback was set up in a way that cannot work."""


class SIGTERMException(SystemExit):
    """The process was asked to terminate (SIGTERM) and the running step has finished.

    Args:
        code: Exit code of the process; 143 is what a shell reports for SIGTERM (128 + 15).
    """

    def __init__(self, code: int = 143) -> None:
        super().__init__(code)
