# SPDX-License-Identifier: Apache-2.0
"""Work for the dies (XCDs) of an AMD GPU, each of which has an L2 cache of its own.

An MI300X has eight, and workgroups go to them in turns. Tiles that share rows of x or of the weight have neighbouring
numbers, and so each die would read what all tiles that run together need. Hence a program takes a tile of another
number: those of a die are neighbours, and what they share comes to it once.
"""

from triton import jit
from triton.experimental import gluon
from triton.language import constexpr


def _neighbours(program, programs, XCDS: constexpr):
    if XCDS == 1:
        return program
    else:
        xcd = program % XCDS
        return xcd * (programs // XCDS) + min(xcd, programs % XCDS) + program // XCDS


# The number of the piece of work, of `programs`, that is program number `program`'s, where XCDS dies have every
# XCDS-th program each: in Triton, and in Gluon.
neighbours = jit(_neighbours)
neighbours_gluon = gluon.jit(_neighbours)
