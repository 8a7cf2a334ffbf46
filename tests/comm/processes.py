# SPDX-License-Identifier: Apache-2.0
"""Runs a function as several ranks on this machine."""

import datetime
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run_ranks(
    world: int, function: Callable[..., None], *args: Any, backend: str = "gloo", preload: Sequence[str] = ()
) -> None:
    """Calls function(rank, *args) in `world` processes that form the default group; raises what one of them raises.

    The first call imports the modules of `preload` once for the processes of all calls.
    """
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", *preload, function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        multiprocessing.start_processes(
            _rank, (world, rendezvous, backend, function, args), nprocs=world, start_method="forkserver"
        )


def _rank(
    rank: int, world: int, rendezvous: Path, backend: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    # In groups of groups too, no rank is done and gone while another one still connects to it, which would fail.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=600)
    dist.init_process_group(backend, f"file://{rendezvous}", timeout, world, rank)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
