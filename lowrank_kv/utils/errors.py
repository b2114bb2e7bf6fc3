"""The one exception type for mistakes a user can mend."""


class UserError(ValueError):
    """A wrong argument, file or configuration value.

    The message is one paragraph that names the argument, the value found and the remedy. Command-line entry points
    print it without a traceback and exit with status 2; every other exception is a defect and keeps its traceback.
    """
