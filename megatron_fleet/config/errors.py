"""The one exception a user is meant to read."""


class UserError(Exception):
    """Bad input or an impossible request, told in one sentence.

    The message names the file (or config key), the row or field, what was expected and what to do. The command line
    prints it without a traceback and exits with status 2.
    """
