"""One exception tree; each class says which verdict it makes of a cell.

Outcomes that carry a verdict travel from a job or the farm to the border of
a cell (`farm.worker`), which turns them into one row.  `UsageError` never
reaches a cell: it ends the process with exit code 3 before any actor starts.
"""

from __future__ import annotations

from pathlib import Path

from farm.records import Reason, Verdict

USAGE_EXIT, INTERRUPTED_EXIT = 3, 130  # of the process; farm.records.exit_code has the others


class FarmError(Exception):
    """Base.  `verdict` and `reason` are what a cell that meets it ends with."""

    verdict: Verdict = Verdict.ERROR
    reason: Reason = Reason.FARM_ERROR

    def __init__(self, message: str, *, reason: Reason | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason

    def __reduce__(self):
        # Exceptions with keyword arguments do not pickle by themselves, and these cross actors.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(kind: type[FarmError], args: tuple, state: dict) -> FarmError:
    error = kind.__new__(kind)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class UsageError(FarmError):
    """Bad usage or configuration: what, where (file and line), and the next step.  Exit code 3."""

    reason = Reason.BAD_CONFIG

    def __init__(self, message: str, *, file: str | Path | None = None, line: int | None = None) -> None:
        self.file, self.line, self.what = file, line, message
        place = "" if file is None else f"{file}:" if line is None else f"{file}:{line}:"
        super().__init__(f"{place} {message}".strip())


class SeriesError(UsageError):
    """A series or one of its patches is wrong: lint, a missing file, a hunk that does not apply."""


class PinError(UsageError):
    """A pin cannot be had: no registry has it, or an installed package is not what its RECORD says."""


class EnvironmentBuildError(FarmError):
    """A pin's environment could not be built on this node (network, disk, pip)."""

    reason = Reason.ENV_BUILD_FAILED


class ResultsUnwritable(FarmError):
    """The results root takes no more rows (disk full, read-only, gone).  Ends the run, never a cell: its rows are not lost
    to a verdict, it is run again when the run is resumed."""


class SkipCell(FarmError):
    """The card cannot run this cell."""

    verdict = Verdict.SKIP
    reason = Reason.NEEDS_UNMET


class InvalidMeasurement(FarmError):
    """The measurement broke its own rules: no evidence either way."""

    verdict = Verdict.INVALID
    reason = Reason.MISSING_ROWS


class TreeFailure(FarmError):
    """Evidence against the tree, found before the job could compare anything."""

    verdict = Verdict.FAIL
    reason = Reason.TREE_FAILED


class BootFailure(FarmError):
    """A server did not come up.  `log_tail` holds its last lines, newest last."""

    reason = Reason.BOOT_DIED

    def __init__(self, message: str, *, reason: Reason | None = None, log_tail: str = "") -> None:
        super().__init__(message, reason=reason)
        self.log_tail = log_tail


class RefusedConfig(BootFailure):
    """vLLM itself refused the configuration; `str(error)` carries its own sentence."""

    verdict = Verdict.INVALID
    reason = Reason.REFUSED_CONFIG


class ServerLost(BootFailure):
    """The server died or went silent after it had been healthy."""

    reason = Reason.SERVER_LOST


class RequestFailed(FarmError):
    """A request failed, was cut, or ran past its deadline."""

    reason = Reason.REQUEST_FAILED


class RequestOverdue(RequestFailed):
    """A request ran past its deadline; `heard`: whether any event of an answer had come.  `log_tail` as in BootFailure."""

    def __init__(self, message: str, *, heard: bool, log_tail: str = "") -> None:
        super().__init__(message)
        self.heard, self.log_tail = heard, log_tail


class TestProcessLost(FarmError):
    """The test process ended before it had reported what it was asked to run."""

    __test__ = False  # pytest collects classes called Test*
    reason = Reason.TESTS_CRASHED
