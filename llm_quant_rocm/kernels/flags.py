# SPDX-License-Identifier: Apache-2.0
"""Zeros in a GPU's memory by which the programs of a kernel tell each other what is done.

A kernel leaves them as zeros, so that nobody need clear them for the next one: that is a kernel of its own, which takes
as long as a small product. Kernels of one stream run one after another, so each stream has zeros of its own. As with
cuBLAS's workspaces, graphs that were captured on one stream must not be replayed at the same time as each other.

They may be asked for first while an engine loads a model, by what compiles its kernels, and lie outside of the pool
that the engine has its weights in: vLLM takes that memory away when it sleeps (`--enable-sleep-mode`), and after level
2 gives back other memory, which need not be zeros. A pool is a thread's.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.runtime import driver

FLAGS = 8192
STREAMS = 64

# A GPU's, [STREAMS, FLAGS], and those of one of its streams.
_all: dict[torch.device, torch.Tensor] = {}
_flags: dict[tuple[torch.device, int], torch.Tensor] = {}
_lock = threading.Lock()


def flags_of(device: torch.device) -> torch.Tensor:
    """`FLAGS` zeros, int32, for a kernel that is launched on the current stream of the GPU `device`."""
    key = device, driver.active.get_current_stream(device.index)
    flags = _flags.get(key)
    if flags is None:
        with _lock:  # two threads, each with a stream of its own, must not get the same ones
            flags = _flags_of_stream(key)
    return torch.zeros(FLAGS, dtype=torch.int32, device=device) if flags is None else flags


def parts_and_flags(
    shape: tuple[int, ...] | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Memory for parts of tiles, fp32 of that shape, and `flags_of` for those who add them up; for None neither."""
    return (torch.empty(shape, dtype=torch.float32, device=device), flags_of(device)) if shape else (None, None)


def _flags_of_stream(key: tuple[torch.device, int]) -> torch.Tensor | None:
    """A stream's from now on; None where it gets none."""
    device, _ = key
    # What a capture allocates belongs to its graph, and is zero when that is replayed, not before.
    if device not in _all and not torch.cuda.is_current_stream_capturing():
        with ThreadPoolExecutor(1) as elsewhere:
            _all[device] = elsewhere.submit(torch.zeros, (STREAMS, FLAGS), dtype=torch.int32, device=device).result()
        torch.cuda.synchronize(device)  # another stream may be the next to use them
    place = sum(known == device for known, _ in _flags)
    if device not in _all or place >= STREAMS:
        return None
    return _flags.setdefault(key, _all[device][place])
