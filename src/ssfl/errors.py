"""Errors meant for people: one sentence that says what is wrong and what to do about it.

The command line prints them without a traceback and exits with code 2; library callers can catch
`SSFLError` and know that nothing else of ours was meant to reach them.
"""


class SSFLError(Exception):
    """Something the user can put right; its message is one sentence."""


class ConfigError(SSFLError):
    """A configuration that cannot be run: an unknown key, a value out of range, a contradiction."""


class DataError(SSFLError):
    """Images that are missing, incomplete, unreadable or unsuited to what was asked of them."""


class CheckpointError(SSFLError):
    """A saved state that cannot be read, written, or fitted to the model at hand."""


class FederationError(SSFLError):
    """A round that could not be completed: too few replies, a lost transport, a refused update,
    another process at work on the same run."""
