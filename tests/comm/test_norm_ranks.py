# SPDX-License-Identifier: Apache-2.0
"""An engine's group, made known to `ops.reduce_norm_quant`, between gloo processes: connected by all ranks or none."""

import gc
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm import ops, reference
from llm_quant_rocm.comm import norm_ranks, reduce_norm_quant
from llm_quant_rocm.comm.group import Members
from llm_quant_rocm.comm.policy import Settings
from llm_quant_rocm.comm.reduce_norm_quant import Ranks, predicted, ranks_named
from llm_quant_rocm.comm.setup_errors import Disagreement
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, Target
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.hardware import nvidia
from tests.comm.processes import run_ranks
from tests.inputs import random_rows

WORLD = 2
MIB = 1 << 20
NAME = "tp:0"


class Lines(logging.Handler):
    """What the library logs at INFO and above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        """The lines since the last call."""
        taken, self._lines = self._lines, []
        return taken


def listen() -> Lines:
    lines, logger = Lines(), logging.getLogger("llm_quant_rocm")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    return lines


def on_one_host(group: dist.ProcessGroup, source_rank: int) -> Sequence[bool]:
    return [True] * WORLD


def on_hosts_of_their_own(group: dist.ProcessGroup, source_rank: int) -> Sequence[bool]:
    return [rank == source_rank for rank in range(WORLD)]


def members(device: str = "cpu", **changes: Any) -> Members:
    facts = {
        "engine": "an engine",
        "name": NAME,
        "cpu_group": dist.group.WORLD,
        "device_group": dist.group.WORLD,
        "device": torch.device(device, dist.get_rank() if device == "cuda" else 0),
        "same_host": on_one_host,
        "visible_devices": "CUDA_VISIBLE_DEVICES",
    }
    return Members(**facts | changes)


def connect(refusal: str | None = None, transport: Any = None, device: str = "cpu", **changes: Any) -> str | None:
    return norm_ranks.connect(members(device, **changes), Settings(), refusal, transport, None)


def is_known() -> bool:
    try:
        ranks_named(NAME)
    except ValueError:
        return False
    return True


def sums_of_a_connected_group(rank: int) -> None:
    """An operator over the connected name gives the reference's bits. Who connects again has the later settings."""
    xs = [random_rows(5, 96, torch.bfloat16, peer) for peer in range(WORLD)]
    weight, residual = torch.linspace(-2, 2, 96), random_rows(5, 96, torch.bfloat16, 9)
    for codec in (None, CODECS["INT4"]):

        def engine(x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("nobody measured that the engine's all-reduce is faster")

        assert norm_ranks.connect(members(), Settings(codec), None, object(), engine) == NAME
        ranks = ranks_named(NAME)
        assert (ranks.world, ranks.memory, ranks.engine) == (WORLD, None, engine)
        assert ranks.plan.steps[:2] == predicted(WORLD, codec or CODECS["FP"]).steps
        found = ops.reduce_norm_quant(xs[rank], weight, residual, group=NAME, eps=1e-5)
        target = Target(Quantization.FP8_PER_TOKEN, normed=False)
        wanted = reference.reduce_norm_quant(xs, residual, Norm(weight, 1e-5), target, CODECS["FP"], 1)
        for part in ("residual", "codes", "scales"):
            assert getattr(found, part).view(torch.uint8).equal(getattr(wanted, part).view(torch.uint8)), part


def the_codec_keeps_to_its_sizes(rank: int) -> None:
    """The variables that say which messages QuickReduce quantizes hold for the fused operator too."""
    exact, quantized = CODECS["FP"], CODECS["INT4"]
    small, large = (MIB, 8 * MIB - 1), (8 * MIB, 32 * MIB)
    for variables in ({"MIN_SIZE_BYTES_MB": "8"}, {"QUANTIZATION_MIN_SIZE_KB": "8192"}):
        names = {"QUANTIZATION": "INT4", "MAX_SIZE_BYTES_MB": "32", **variables}
        settings = Settings.from_environment({f"VLLM_ROCM_QUICK_REDUCE_{name}": text for name, text in names.items()})
        assert norm_ranks.connect(members(), settings, None, None, None) == NAME
        choose = ranks_named(NAME).plan.choose
        assert {choose(size).codec for size in (0, *small, 32 * MIB + 1)} == {exact}
        assert {choose(size).codec for size in large} == {quantized}
    everything = Settings(quantized, min_bytes=0)
    assert norm_ranks.connect(members(), everything, None, None, None) == NAME
    assert {ranks_named(NAME).plan.choose(size).codec for size in (16, *small, *large)} == {quantized}


def who_refuses_does_so_for_all(rank: int) -> None:
    lines = listen()
    kept_apart = f"norm fusion: an engine's all-reduce of the group {NAME} stays apart; "

    def assert_refused(reason: str, *arguments: Any, **changes: Any) -> None:
        reduce_norm_quant._NAMED[NAME] = reduce_norm_quant.ALONE  # of an engine before this one
        assert connect(*arguments, **changes) is None
        assert not is_known()
        assert lines.take() == [kept_apart + reason] * (rank == 0)

    last = rank == WORLD - 1
    assert_refused("only its last rank knows why", "only its last rank knows why" if last else None)
    assert_refused("two reasons", "two reasons" if rank == 0 else "another one")
    assert_refused("its ranks are on several hosts", same_host=on_hosts_of_their_own)
    assert_refused("there are no kernels for meta", device="meta")
    with mock.patch.object(norm_ranks, "WORLD_SIZES", range(2, WORLD)):
        assert_refused("it has 2 ranks, and up to 8 are served")
    # The devices' facts of every rank are those of its own process.
    own = {"CUDA_VISIBLE_DEVICES": f"{rank + 4}"}

    def unreachable(device: torch.device, variable: str, facts: Sequence[Any]) -> str | None:
        assert (variable, facts) == ("CUDA_VISIBLE_DEVICES", [("4", 0), ("5", 1)])
        return "GPU 1 does not reach the memory of GPU 0" if last else None

    with mock.patch.dict("os.environ", own), mock.patch.object(norm_ranks, "unreachable", unreachable):
        with mock.patch.object(norm_ranks, "detect", lambda device: nvidia(9, 0)):
            assert_refused("GPU 1 does not reach the memory of GPU 0", device="cuda")
        with mock.patch.object(norm_ranks, "detect", lambda device: nvidia(8, 0)):
            assert_refused("Triton has no conversion to FP8 for sm_80", device="cuda")


def who_disagrees_is_kept_apart(rank: int) -> None:
    """As from environments of their own, which ranks have that no engine has started."""
    lines = listen()
    for codecs in (("INT4", "FP4"), ("INT4", "FP")):
        settings = Settings(CODECS[codecs[rank]], min_bytes=0)
        assert norm_ranks.connect(members(), settings, None, None, None) is None
        assert not is_known()
        reason = "the ranks have different settings or measured crossovers"
        said = f"norm fusion: an engine's all-reduce of the group {NAME} stays apart; {reason}"
        assert [line for line in lines.take() if line.startswith("norm fusion")] == [said] * (rank == 0)


def who_has_another_backend_is_kept_apart(rank: int) -> None:
    """Ranks that run a kernel and ranks that use the process group would wait for each other for ever."""
    lines, variable = listen(), "LLM_QUANT_ROCM_REDUCE_NORM_QUANT"
    reason = f"{variable} is unset on rank 0, triton on rank 1: set the same on all"
    with mock.patch.dict("os.environ", {variable: "triton" if rank else ""}):
        assert connect() is None
        assert not is_known()
        said = f"norm fusion: an engine's all-reduce of the group {NAME} stays apart; {reason}"
        assert lines.take() == [said] * (rank == 0)
        with pytest.raises(Disagreement, match=f"^{reason}$"):
            reduce_norm_quant.connect(NAME, dist.group.WORLD, torch.device("cpu"))
        assert not is_known()
    with mock.patch.dict("os.environ", {variable: "triton"}):
        assert connect() == NAME


def a_broken_file_ends_all(rank: int) -> None:
    """Also the ranks whose own is whole: they would wait for the one that reads it."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {"XDG_CACHE_HOME": folder}):
        file = Path(folder) / "llm-quant-rocm" / "reduce_norm_quant" / "cpu.json"
        if rank == 1:
            file.parent.mkdir(parents=True)
            file.write_text("[]")
        whose = folder if rank == 1 else "rank 1: "
        with pytest.raises(ValueError, match=f"^{whose}.* is no file of crossovers"):
            connect()
        assert not is_known()
        dist.barrier()


@contextmanager
def on_gpus(obstacle: str | None) -> Iterator[list[Any]]:
    """GPUs that reach each other, whose peer memory `obstacle` may forbid; gives the checks that are watched."""
    watched: list[Any] = []

    def register(name: str, group: Any, device: Any, codec: Any, memory: Any, *others: Any) -> Ranks:
        assert device == torch.device("cuda", dist.get_rank(group))
        own = memory or (None if obstacle else SimpleNamespace(check=f"the check of {NAME}"))
        reduce_norm_quant._NAMED[name] = Ranks(WORLD, predicted(WORLD), group, own, obstacle)
        return ranks_named(name)

    with (
        mock.patch.object(norm_ranks.reduce_norm_quant, "connect", register),
        mock.patch.object(norm_ranks, "unreachable", lambda *facts: None),
        mock.patch.object(norm_ranks, "Watch", watched.append),
        mock.patch.object(norm_ranks, "detect", lambda device: nvidia(9, 0)),
    ):
        yield watched


def memory_is_shared_or_watched(rank: int) -> None:
    """Memory of its own is watched over; the quantized all-reduce's is watched by that. Without memory on one rank no
    rank is connected, nor watched."""
    shared = SimpleNamespace(mailbox=..., check="another's check")
    last = rank == WORLD - 1
    for transport, obstacle, connected, checks in (
        (None, None, NAME, [f"the check of {NAME}"]),
        (object(), None, NAME, [f"the check of {NAME}"]),
        (shared, None, NAME, []),
        (None, "no memory" if last else None, None, []),
    ):
        with on_gpus(obstacle) as watched:
            assert connect(transport=transport, device="cuda") == connected
        assert watched == checks
        assert is_known() == (connected is not None)
        if transport is shared:
            assert ranks_named(NAME).memory is shared


def a_group_goes_with_its_owner(rank: int) -> None:
    """Name, memory and watch; but not where another group has taken the name."""
    watches = [mock.Mock(), mock.Mock()]
    owners = [mock.Mock(), mock.Mock()]
    for owner, watch in zip(owners, watches, strict=True):
        with on_gpus(None), mock.patch.object(norm_ranks, "Watch", return_value=watch):
            assert connect(device="cuda") == NAME
        norm_ranks.disconnect_with(owner, NAME)
    del owner
    for left in (True, False):
        owners.pop(0)
        gc.collect()
        assert is_known() == left
        assert [watch.stop.called for watch in watches] == [True, not left]


CASES = (
    a_group_goes_with_its_owner,
    sums_of_a_connected_group,
    the_codec_keeps_to_its_sizes,
    who_refuses_does_so_for_all,
    who_disagrees_is_kept_apart,
    who_has_another_backend_is_kept_apart,
    a_broken_file_ends_all,
    memory_is_shared_or_watched,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_between_processes(case: Any) -> None:
    run_ranks(WORLD, case)
