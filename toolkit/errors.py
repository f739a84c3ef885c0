"""What speaks to the user: what is wrong, where, and what to do."""

from toolkit.escaping import one_line
from toolkit.redaction import redact_known


class UsageError(ValueError):
    """A mistake that the user can fix.

    The command line prints its text without a traceback and exits with status 2;
    nothing has been started or written by then.
    """

    def __str__(self) -> str:
        # It quotes what the user passed: a name with a line feed in it, a token.
        return one_line(redact_known(super().__str__()))


class GuardError(RuntimeError):
    """A guard stopped the run: every rank raises it after the same step, in the same words."""


def sentence_of(error: BaseException) -> str:
    """Return the first line of what a library says, with a full stop."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
