"""What speaks to the user: what is wrong, where, and what to do."""


class UsageError(ValueError):
    """A mistake that the user can fix.

    The command line prints its text without a traceback and exits with status 2;
    nothing has been started or written by then.
    """


class GuardError(RuntimeError):
    """A guard stopped the run: every rank raises it after the same step, in the same words."""


def sentence_of(error: BaseException) -> str:
    """Return the first line of what a library says, with a full stop."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
