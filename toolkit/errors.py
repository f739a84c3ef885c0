"""The one exception that speaks to the user: what is wrong, where, and what to do."""


class UsageError(ValueError):
    """A mistake that the user can fix.

    The command line prints its text without a traceback and exits with status 2;
    nothing has been started or written by then.
    """
