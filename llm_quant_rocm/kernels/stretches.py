# SPDX-License-Identifier: Apache-2.0
"""How steps are shared out evenly to programs: each has a stretch of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def begin_of(program, groups, programs=None):
    """Where the program's stretch of `groups` begins; it ends where the next one's begins."""
    if programs is None:
        programs = gl.num_programs(0)
    return program * (groups // programs) + gl.minimum(program, groups % programs)
