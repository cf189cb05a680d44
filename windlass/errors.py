"""Errors that a user can put right, apart from faults of ours."""


class UserError(Exception):
    """Something the user can put right. The command line prints the message alone, no traceback."""


class PeerLost(Exception):
    """Another process of the run does not answer any more."""
