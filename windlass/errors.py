"""What a user can put right, and how it is told apart from a fault of ours."""

import errno

# What the system says where there is no room for a file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Something the user can put right. The command line prints the message alone, no traceback."""


class PeerLost(Exception):
    """Another process of the run does not answer any more."""
