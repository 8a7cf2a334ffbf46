# SPDX-License-Identifier: Apache-2.0
"""What stops a command: one sentence for the user, with the cure."""


class CommandError(Exception):
    """A condition that the user can mend; its message says how."""
