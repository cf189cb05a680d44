"""What a user can put right, and how it is told apart from a fault of ours."""


class UserError(Exception):
    """Something the user can put right. The command line prints the message alone, no traceback."""


class PeerLost(Exception):
    """Another process of the run does not answer any more."""
