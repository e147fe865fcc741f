"""Exit codes of the command line."""

OK = 0
"""All went well; for `check`, every claim is as expected."""
UNEXPECTED = 1
"""`check`: some claim is not as expected, or seeds gave bitwise equal results."""
BAD_INPUT = 2
"""Something that the user can put right: a name, an option, a file, a folder, a missing package."""
NOT_ENOUGH = 3
"""`check`: all that could be judged is as expected, but some claims lack runs, or nothing is claimed of a preset."""
FAILED = 4
"""A cell of the experiment failed while it ran."""
INTERRUPTED = 130
"""Stopped by Ctrl-C; the same command goes on."""
TERMINATED = 143
"""Stopped by SIGTERM, as a cluster does at the end of the time; the same command goes on."""
