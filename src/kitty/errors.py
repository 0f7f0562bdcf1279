"""The one exception class for mistakes a user can mend."""


class KittyError(ValueError):
    """Bad input or state, told in one sentence: the value, the limit and the remedy.

    The command line prints the sentence without a traceback and exits with a non-zero code.
    """
