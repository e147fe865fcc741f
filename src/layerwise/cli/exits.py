"""Exit codes of the command line."""

OK = 0
"""All went well; for `check`, every claim is as expected."""
UNEXPECTED = 1
"""`check`: some claim is not as expected."""
BAD_INPUT = 2
"""Something that the user can put right: a name, an option, a file, a folder, a missing package."""
NOT_ENOUGH = 3
"""`check`: all that could be judged is as expected, but some claims lack runs."""
FAILED = 4
"""A cell of the experiment failed while it ran."""
INTERRUPTED = 130
"""Stopped by Ctrl-C; the same command goes on."""
