# SPDX-License-Identifier: Apache-2.0
"""Parts of a tile's sum on Hopper, from the programs of a cluster to those of them that add, by way of each other's
shared memory.

The programs of a cluster run at the same time on neighbouring multiprocessors and share the steps along K of one tile.
Each adds some of the tile's columns, as far as these go; what the others have of them comes to its inbox from their
registers, and a barrier there counts the bytes. Programs that are none of a cluster leave their parts in the L2 cache
(`wgmma_parts`), which takes longer.

Triton has clusters only where several multiprocessors run one program. Here each runs a program of its own
(`launch.launch` puts them together), so that inboxes are declared, and reached, in PTX, beside the shared memory that
Triton knows of.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llm_quant_rocm.kernels.hopper import acc_layout_of, declare_shared, run_ptx
from llm_quant_rocm.kernels.wgmma_parts import columns_of, piece_columns

# The consumers' barriers come first. Triton's shared memory comes after the inbox, and tiles that the tensor memory
# accelerator swizzles begin at multiples of so many bytes.
_BARRIERS = gl.constexpr(1024)
# Of the values that the 128 threads of a consumer have of eight columns of its 64 rows, 16 bytes each.
_EIGHT_COLUMNS = gl.constexpr(2048)


# That PTX declares.
MOST_INBOX_BYTES = 48 * 1024


@gluon.constexpr_function
def _piece_bytes(columns, programs):
    return piece_columns(columns, programs) // 8 * _EIGHT_COLUMNS.value


@gluon.constexpr_function
def inbox_bytes(consumers, columns, programs):
    """Bytes of an inbox for so many consumers with 64 rows and `columns` columns each."""
    return _BARRIERS.value + consumers * (programs - 1) * _piece_bytes(columns, programs)


@gluon.constexpr_function
def _init_assembly(consumers, columns, programs):
    """Each barrier waits for one turn of all bytes that come; only the first lane writes."""
    expected = (programs - 1) * _piece_bytes(columns, programs)
    barriers = [f"[$1 + {8 * consumer}]" for consumer in range(consumers)]
    return "\n".join([
        "{ .reg .pred one; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0;",
        *(f"@one mbarrier.init.shared::cta.b64 {barrier}, 1;" for barrier in barriers),
        "@one fence.mbarrier_init.release.cluster;",
        *(f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, {barrier}, {expected};" for barrier in barriers),
        "mov.b32 $0, $1; }",
    ])  # fmt: skip


# $4 to $7 are values of a thread and $8 the address of its consumer's first in the inbox, $12 the barrier's and $16 the
# program that they are sent to.
_SEND = gl.constexpr(
    "{ .reg .b32 at, barrier; mov.u32 at, %tid.x; and.b32 at, at, 127; mad.lo.u32 at, at, 16, $8; "
    "mapa.shared::cluster.u32 at, at, $16; mapa.shared::cluster.u32 barrier, $12, $16; "
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [at], {$4, $5, $6, $7}, [barrier]; "
    "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)
_WAIT = gl.constexpr(
    "{ .reg .pred there; wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 there, [$1], 0; "
    "@!there bra wait; mov.b32 $0, 0; }"
)
_RECEIVE = gl.constexpr(
    "{ .reg .b32 at; mov.u32 at, %tid.x; and.b32 at, at, 127; mad.lo.u32 at, at, 16, $4; "
    "ld.shared::cta.v4.b32 {$0, $1, $2, $3}, [at]; }"
)


@gluon.jit
def inbox_of(value, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, PROGRAMS: gl.constexpr):
    """The address of the program's inbox, for CONSUMERS with 64 rows and COLUMNS columns each. Once in a kernel, as it
    declares it; `value` is any number."""
    return declare_shared(inbox_bytes(CONSUMERS, COLUMNS, PROGRAMS), value)


@gluon.jit
def init_inbox(inbox, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, PROGRAMS: gl.constexpr):
    """Initializes the barriers of an inbox, for a warp alone that then tells the others of the cluster (`arrive`)."""
    run_ptx(_init_assembly(CONSUMERS, COLUMNS, PROGRAMS), inbox)


@gluon.jit
def arrive(value):
    """Tells the cluster that this thread is there. Every thread does, once, and waits for all others before it ends."""
    run_ptx("barrier.cluster.arrive.release; mov.b32 $0, $1;", value)


@gluon.jit
def wait_for_all(value):
    """Waits until every thread of the cluster has arrived: inboxes are there then."""
    run_ptx("barrier.cluster.wait.acquire; mov.b32 $0, $1;", value)


@gluon.jit
def _addresses(first, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Of each value [64, COLUMNS], where those of its eight columns begin; `first` is where the first do."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return gl.zeros((64, COLUMNS), gl.int32, layout=layout) + (first + column // 8 * _EIGHT_COLUMNS)[None, :]


@gluon.jit
def _slot(inbox, sender, adder, CONSUMER: gl.constexpr, COLUMNS: gl.constexpr, PROGRAMS: gl.constexpr):
    """Where in the inbox of program `adder` a consumer finds what program `sender` has sent; anywhere for the same."""
    other = gl.minimum(gl.where(sender > adder, sender - 1, sender), PROGRAMS - 2)
    return inbox + _BARRIERS + (CONSUMER * (PROGRAMS - 1) + other) * (COLUMNS // 8 * _EIGHT_COLUMNS)


@gluon.jit
def send_parts(total, inbox, rank, CONSUMER: gl.constexpr, PROGRAMS: gl.constexpr):
    """Sends the other programs of the cluster what they add of a consumer's total [64, M], and returns what program
    `rank` itself adds of it, [64, `piece_columns`], of no use where that is nothing."""
    PIECE: gl.constexpr = piece_columns(total.shape[1], PROGRAMS)
    layout: gl.constexpr = acc_layout_of(PIECE)
    zeros = gl.zeros((64, PIECE), gl.int32, layout=layout)
    mine = columns_of(total, PIECE, 0, layout)
    for adder in gl.static_range(total.shape[1] // PIECE):
        columns = columns_of(total, PIECE, adder, layout)
        if rank == adder:
            mine = columns
        else:
            slot = _slot(inbox, rank, adder, CONSUMER, PIECE, PROGRAMS)
            gl.inline_asm_elementwise(
                _SEND, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [columns, _addresses(slot, PIECE, layout), zeros + (inbox + CONSUMER * 8), zeros + adder],
                dtype=gl.int32, is_pure=False, pack=4,
            )  # fmt: skip
    return mine


@gluon.jit
def add_parts(mine, inbox, rank, CONSUMER: gl.constexpr, PROGRAMS: gl.constexpr):
    """What all programs of the cluster have of the columns that program `rank` adds, of which `mine` is its own. In the
    programs' order: a row of x that two halves of a tile have is added alike by the two that add these."""
    COLUMNS: gl.constexpr = mine.shape[1]
    layout: gl.constexpr = mine.type.layout
    run_ptx(_WAIT, inbox + CONSUMER * 8)
    total = gl.zeros_like(mine)
    for sender in gl.static_range(PROGRAMS):
        slot = _slot(inbox, sender, rank, CONSUMER, COLUMNS, PROGRAMS)
        sent = gl.inline_asm_elementwise(
            _RECEIVE, "=r,=r,=r,=r,r,r,r,r", [_addresses(slot, COLUMNS, layout)],
            dtype=gl.float32, is_pure=False, pack=4,
        )  # fmt: skip
        total += gl.where(rank == sender, mine, sent)
    return total
