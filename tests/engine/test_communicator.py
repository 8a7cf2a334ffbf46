# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce in vLLM's own groups of processes, on one host and on two, and when it steps aside."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
import vllm
from vllm import _aiter_ops
from vllm.distributed.device_communicators import cuda_communicator
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.utils.import_utils import resolve_obj_by_qualname

from llm_quant_rocm import hardware
from llm_quant_rocm.comm import group as group_module
from llm_quant_rocm.comm.policy import Algorithm, Policy, Settings
from llm_quant_rocm.comm.quick_reduce import QuickReduce
from llm_quant_rocm.formats.wire import CODECS, DTYPES
from llm_quant_rocm.reference import quick_reduce as reference
from llm_quant_rocm.tuning import cache_file
from llm_quant_rocm_vllm import communicator, patches, reduce_norm
from tests.comm import processes
from tests.inputs import assert_same, random_rows

PREFIX = "VLLM_ROCM_QUICK_REDUCE_"
MIB = 1024 * 1024
# Seconds to import, once in place of once a process.
PRELOAD = ("llm_quant_rocm.comm.quick_reduce", "llm_quant_rocm_vllm.communicator", "llm_quant_rocm_vllm.patches")
CUDA = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"


def inputs(world: int, count: int = 1000, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [random_rows(1, count, dtype, seed) for seed in range(world)]


def run_ranks(world: int, function: Callable[..., None], *args: Any) -> None:
    processes.run_ranks(world, function, *args, preload=PRELOAD)


def lines(log: MagicMock) -> list[str]:
    return [call.args[0] % call.args[1:] for call in log.call_args_list]


def group(world: int, name: str = "tp", **variables: str) -> tuple[GroupCoordinator, list[str]]:
    """A group of vLLM's over all ranks, and what its making logged at INFO."""
    ident = [uuid4().hex]  # of vLLM's shared memory, unlike that of a test that failed
    dist.broadcast_object_list(ident)
    os.environ["VLLM_DIST_IDENT"] = ident[0]
    for variable in [variable for variable in os.environ if variable.startswith(PREFIX)]:
        del os.environ[variable]
    os.environ.update({PREFIX + variable: value for variable, value in variables.items()})
    patches.apply()
    with patch.object(communicator.logger, "info") as log:
        made = GroupCoordinator([list(range(world))], dist.get_rank(), "gloo", True, group_name=name)
    if dist.get_rank() == 0:
        for file in Path("/dev/shm").glob(f"{ident[0]}*"):
            file.unlink()  # all ranks have opened it, and none of them removes it at its end
    return made, lines(log)


def assert_added(found: torch.Tensor, xs: Sequence[torch.Tensor]) -> None:
    """The sum of bf16 `xs`, one a rank, exact but for one rounding. On CPUs without AVX512-BF16 vLLM's own all-reduce
    rounds towards zero, where gloo, which serves other groups, rounds to nearest."""
    total = torch.stack([x.float() for x in xs]).sum(0)
    torch.testing.assert_close(found.float(), total, rtol=2**-7, atol=0)


def by_vllm(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a tensor-parallel group without our all-reduce adds."""
    plain, _ = group(len(xs), QUANTIZATION="NONE")
    found = plain.all_reduce(xs[dist.get_rank()].clone())
    assert_added(found, xs)
    return found


def reduce_on_one_host(rank: int, world: int) -> None:
    for codec in ("FP4", "INT8"):
        tp, said = group(world, QUANTIZATION=codec, MIN_SIZE_BYTES_MB="0")
        assert len(said) == (1 if rank == 0 else 0)
        assert all(line.startswith(f"quantized all-reduce: process_group {codec} from 0 bytes") for line in said)
        for dtype in (torch.bfloat16, torch.float16):
            xs = inputs(world, dtype=dtype)
            assert_same(tp.all_reduce(xs[rank]), reference.two_shot(xs, CODECS[codec]))
        # What vLLM serves is added as ever, in place or not.
        found = tp.all_reduce(torch.full((8,), 2.0**rank))
        assert found.tolist() == [2.0**world - 1] * 8

    # The sizes of upstream's thresholds.
    tp, _ = group(world, QUANTIZATION="FP4")
    small, large = inputs(world, MIB // 2 - 1), inputs(world, MIB // 2)
    assert_same(tp.all_reduce(small[rank].clone()), by_vllm(small))
    assert_same(tp.all_reduce(large[rank]), reference.two_shot(large, CODECS["FP4"]))

    # FP, and what travels as fp16.
    tp, _ = group(world, QUANTIZATION="FP4", MIN_SIZE_BYTES_MB="0", QUANTIZATION_MIN_SIZE_KB="2", CAST_BF16_TO_FP16="1")
    few, many = inputs(world, 512), inputs(world, 1024)
    assert_same(tp.all_reduce(few[rank]), reference.two_shot(few, CODECS["FP"], True))
    assert_same(tp.all_reduce(many[rank]), reference.two_shot(many, CODECS["FP4"], True))

    # Other groups, and no codec.
    for name, codec in (("ep", "FP4"), ("pp", "FP4"), ("tp", "NONE")):
        other, said = group(world, name, QUANTIZATION=codec, MIN_SIZE_BYTES_MB="0")
        assert not said
        assert getattr(other.device_communicator, "quantized", None) is None
        few = inputs(world, 512)
        assert_added(other.all_reduce(few[rank].clone()), few)
    assert type(other.device_communicator).__name__ == "CpuCommunicator"


def test_two_ranks() -> None:
    run_ranks(2, reduce_on_one_host, 2)


def reduce_compiled(rank: int) -> None:
    """As a part of a compiled graph without breaks, messages of both kinds, with what was sent in use afterwards."""
    tp, _ = group(2, QUANTIZATION="FP4", MIN_SIZE_BYTES_MB="0", MAX_SIZE_BYTES_MB="1")

    def send(x: torch.Tensor) -> torch.Tensor:
        sent = x + 1
        return tp.all_reduce(sent) - sent

    run = torch.compile(send, fullgraph=True, backend="aot_eager", dynamic=True)
    for count, quantized in ((512, True), (MIB, False)):
        xs = inputs(2, count)
        sent = [x + 1 for x in xs]
        total = reference.two_shot(sent, CODECS["FP4"]) if quantized else by_vllm(sent)
        assert_same(run(xs[rank]), total - sent[rank])


def test_compiled() -> None:
    run_ranks(2, reduce_compiled)


def nodes(hosts: list[list[int]]) -> Any:
    """vLLM's test of who shares a host, as if these did."""

    def same(group: dist.ProcessGroup, source_rank: int = 0) -> list[bool]:
        host = next(host for host in hosts if source_rank in host)
        return [rank in host for rank in range(dist.get_world_size(group))]

    return patch.object(reduce_norm, "in_the_same_node_as", same)


def reduce_on_hosts(rank: int, hosts: list[list[int]]) -> None:
    world = sum(map(len, hosts))
    with nodes(hosts):
        tp, said = group(world, QUANTIZATION="FP4", MIN_SIZE_BYTES_MB="0")
    if rank == 0:
        assert said[0].startswith("quantized all-reduce: two_level FP4 from 0 bytes")
    xs = inputs(world)
    found = tp.all_reduce(xs[rank])
    assert_same(found, reference.two_level([[xs[other] for other in host] for host in hosts], CODECS["FP4"]))


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0], [1]]], ids=str)
def test_several_hosts(hosts: list[list[int]]) -> None:
    run_ranks(sum(map(len, hosts)), reduce_on_hosts, hosts)


def reduce_what_is_left_to_vllm(rank: int) -> None:
    """Who calls `quick_all_reduce` by itself, as upstream's tests do, is served at every size."""
    tp, _ = group(2, QUANTIZATION="INT8", QUANTIZATION_MIN_SIZE_KB="1")
    ours = tp.device_communicator.quantized
    for count, codec in ((80_008, "INT8"), (40, "FP"), (0, "FP")):
        xs = [x.half().flatten().repeat(1 + count // x.numel())[:count] for x in inputs(2)]
        assert not ours.should_quick_allreduce(xs[rank])
        assert_same(ours.quick_all_reduce(xs[rank]), reference.two_shot(xs, CODECS[codec]))
    with pytest.raises(TypeError, match=r"takes bf16 or fp16, not torch\.float32"):
        ours.quick_all_reduce(torch.ones(64))


def test_what_is_left_to_vllm_is_served_too() -> None:
    run_ranks(2, reduce_what_is_left_to_vllm)


def step_aside(rank: int) -> None:
    """Where it cannot serve, one line says why, and vLLM adds."""
    fp32 = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    broken = RuntimeError("no memory for rank 1\nand a trace")
    for reason, cause in (
        ("hosts of 2, 1 ranks: a two-level all-reduce needs as many ranks on every host", nodes([[0, 1], [2]])),
        (
            "the model computes in torch.float32",
            patch.object(communicator, "get_current_vllm_config_or_none", lambda: fp32),
        ),
        ("VLLM_BATCH_INVARIANT is set", patch.object(communicator.envs, "VLLM_BATCH_INVARIANT", True, create=True)),
        (
            "setting it up failed with RuntimeError: no memory for rank 1",
            patch.object(group_module, "warm_up", side_effect=broken if rank == 1 else None),
        ),
    ):
        with cause:
            tp, said = group(3, QUANTIZATION="FP4", MIN_SIZE_BYTES_MB="0")
        assert tp.device_communicator.quantized is None
        assert tp.all_reduce(torch.full((8,), 2.0**rank)).tolist() == [7.0] * 8
        if rank == 0:
            (line,) = said
            assert line.startswith(f"quantized all-reduce: vLLM's own serves the group {tp.unique_name}; {reason}")
            assert "\n" not in line
    # Ranks that would choose differently would wait for each other, or read one another's bytes as another type's.
    for variable, value in (
        ("MIN_SIZE_BYTES_MB", rank),
        ("MAX_SIZE_BYTES_MB", 7 + rank),
        ("CAST_BF16_TO_FP16", int(rank == 1)),
    ):
        tp, said = group(3, **{"QUANTIZATION": "FP4", variable: str(value)})
        assert tp.device_communicator.quantized is None
        assert rank or "the ranks have different settings" in said[0]
    with patch.object(communicator.envs, "VLLM_BATCH_INVARIANT", rank == 1, create=True):
        tp, said = group(3, QUANTIZATION="FP4", MIN_SIZE_BYTES_MB="0")
    assert tp.device_communicator.quantized is None
    assert rank or "VLLM_BATCH_INVARIANT is set" in said[0]


def test_stepping_aside() -> None:
    run_ranks(3, step_aside)


# --- on GPUs


class OnGpus:
    """A communicator as vLLM makes it for a GPU, up to where memory is touched."""

    def __init__(self, rank: int, reach: bool = True, quick_reduce: Any = None) -> None:
        self.cpu_group, self.unique_name = dist.group.WORLD, "tp:0"
        self.device, self.qr_comm = torch.device("cuda", rank), quick_reduce
        self.over, self.watch, self.warm_up = MagicMock(), MagicMock(), MagicMock()
        self.reach = reach

    def connect(self, **variables: str) -> tuple[communicator.QuickReduceComm | None, list[str]]:
        settings = Settings.from_environment({PREFIX + name: value for name, value in variables.items()})
        with (
            patch.object(group_module, "detect", lambda device: hardware.amd("gfx942")),
            patch.object(torch.cuda, "can_device_access_peer", lambda device, peer: self.reach),
            patch.object(QuickReduce, "over", self.over),
            patch.object(group_module, "Watch", self.watch),
            patch.object(group_module, "warm_up", self.warm_up),
            patch.object(communicator.logger, "info") as log,
        ):
            return communicator.connect(self, settings), lines(log)


def connect_gpus(rank: int) -> None:
    gpus = OnGpus(rank)
    found, said = gpus.connect(QUANTIZATION="FP4")
    gpus.over.assert_called_once_with(gpus.cpu_group, gpus.device, timeout=None)
    transport = gpus.over.return_value
    assert gpus.warm_up.call_args.args[:3] == (transport, found.policy, gpus.device)
    gpus.watch.assert_called_once_with(transport.check)
    assert rank or said[0].startswith("quantized all-reduce: engine from 0 bytes, two_shot FP4 from 1048576 bytes")

    # A message of ours goes to the kernels, after a look at what the watch saw; others are declined.
    large, small = (torch.empty(count, dtype=torch.bfloat16, device="meta") for count in (MIB // 2, MIB // 2 - 8))
    assert found.should_quick_allreduce(large) and found.uses_flydsl_int4(large)
    assert not found.should_quick_allreduce(small) and not found.should_quick_allreduce(large.float())
    assert found.quick_all_reduce(large) is transport.all_reduce.return_value
    transport.all_reduce.assert_called_once_with(large, CODECS["FP4"], Algorithm.TWO_SHOT, cast_bf16_to_fp16=False)
    gpus.watch.return_value.raise_if_lost.side_effect = RuntimeError("rank 1 of the group did not arrive in call 7")
    with pytest.raises(RuntimeError, match="did not arrive in call 7"):
        found.quick_all_reduce(large)
    found.close()
    gpus.watch.return_value.stop.assert_called_once_with()

    # No peer access, seen by one rank: all step aside, and nobody asks for memory.
    gpus = OnGpus(rank, reach=rank == 0)
    found, said = gpus.connect(QUANTIZATION="FP4")
    assert found is None and not gpus.over.called
    assert rank or said[0].endswith("; GPU 1 does not reach the memory of GPU 0")

    # vLLM's own QuickReduce serves the codec: it stays until ours is wished for.
    theirs = SimpleNamespace(disabled=False)
    found, said = OnGpus(rank, quick_reduce=theirs).connect(QUANTIZATION="INT4")
    assert found is None
    assert rank or "its QuickReduce serves this codec, and nobody measured ours here" in said[0]
    assert OnGpus(rank, quick_reduce=theirs).connect(QUANTIZATION="INT4", MIN_SIZE_BYTES_MB="1")[0] is not None
    theirs.disabled = True
    assert OnGpus(rank, quick_reduce=theirs).connect(QUANTIZATION="INT4")[0] is not None


def test_on_gpus() -> None:
    run_ranks(2, connect_gpus)


def test_everything_that_may_serve_is_called_before_a_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = cache_file("quick_reduce", "gfx942")
    file.parent.mkdir(parents=True)
    steps = [
        {"from_bytes": 0, "algorithm": "engine"},
        {"from_bytes": 4096, "algorithm": "one_shot", "codec": "FP"},
        {"from_bytes": 65536, "algorithm": "one_shot", "codec": "FP4"},
        {"from_bytes": MIB, "algorithm": "two_shot", "codec": "FP4"},
    ]
    entry = {"world_size": 2, "dtype": "bfloat16", "codec": "FP4", "steps": steps}
    file.write_text(json.dumps({"crossovers": [entry]}))
    settings = Settings(CODECS["FP4"], quantization_min_bytes=2 * MIB, cast_bf16_to_fp16=True)
    policy = Policy(settings, 2, "gfx942")
    transport = MagicMock()
    group_module.warm_up(transport, policy, torch.device("cpu"), DTYPES)
    warm = {(call.args[0].dtype, *call.args[1:]) for call in transport.all_reduce.call_args_list}
    may_serve = set()
    for dtype in (torch.bfloat16, torch.float16):
        for nbytes in [2**power for power in range(1, 32)]:
            choice = policy.choose(nbytes, dtype)
            if choice.codec is not None:
                may_serve.add((dtype, choice.codec, choice.algorithm, True))
    assert warm == may_serve
    assert {choice[2] for choice in warm} == {Algorithm.ONE_SHOT, Algorithm.TWO_SHOT}
    transport.check.assert_called_once_with()


def test_aiter_s_kernel_does_not_send_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 on ROCm, fusing the all-reduce with AITER's RMSNorm: its own codec's levels are not ours."""
    policy = Policy(Settings(CODECS["FP4"], min_bytes=0), 2, "gfx950")
    ours = communicator.QuickReduceComm(MagicMock(), policy, None)
    device_communicator = SimpleNamespace(qr_comm=ours, cpu_group=object(), _aiter_qr_rmsnorm_comm=False)
    fused = SimpleNamespace(custom_fused_ar_rms=lambda x, residual, *_, **__: (x + 1, residual + 1))
    group = SimpleNamespace(device_communicator=device_communicator)
    aiter = SimpleNamespace(aiter_ca=fused, use_1stage_fused_ar_rms=lambda x: False)
    monkeypatch.setitem(sys.modules, "aiter", MagicMock(qr_all_reduce_rmsnorm=MagicMock(side_effect=AssertionError)))
    monkeypatch.setattr(vllm.distributed, "get_tp_group", lambda: group)
    monkeypatch.setattr(_aiter_ops.rocm_aiter_ops, "get_aiter_allreduce", lambda: aiter)
    x, weight = torch.ones(81, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    assert ours.should_quick_allreduce(x)
    out, residual = _aiter_ops._rocm_aiter_fused_allreduce_rmsnorm_impl(x, x, weight, 1e-6)
    assert torch.equal(out, x + 1) and torch.equal(residual, x + 1)


@pytest.mark.parametrize("by_aiter", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
def test_small_messages_are_left_to_the_custom_all_reduce(by_aiter: bool, disabled: bool) -> None:
    custom = SimpleNamespace(disabled=disabled, should_custom_ar=lambda x: x.numel() % 16 == 0)
    made = SimpleNamespace(use_aiter_allreduce=by_aiter, aiter_ar_comm=None, ca_comm=None)
    setattr(made, "aiter_ar_comm" if by_aiter else "ca_comm", custom)
    policy = Policy(Settings(CODECS["FP4"]), 2, "sm_90")
    ours = communicator.QuickReduceComm(MagicMock(), policy, None, communicator._custom(made))
    large = torch.empty(MIB // 2, dtype=torch.bfloat16, device="meta")
    assert ours.should_quick_allreduce(large)
    assert ours.should_quick_allreduce(large[16:]) == disabled
    assert ours.should_quick_allreduce(large[8:])
    assert communicator._custom(object()) is None  # vLLM's communicator of CPUs has none


def under_cuda_s_communicator(rank: int) -> None:
    """The class that serves on GPUs, where it is left to processes: what ours declines goes vLLM's ways."""
    os.environ.update({PREFIX + "QUANTIZATION": "FP4", PREFIX + "MIN_SIZE_BYTES_MB": "0"})
    made = resolve_obj_by_qualname(communicator.class_over(CUDA))(
        dist.group.WORLD, torch.device("cpu"), dist.group.WORLD, "tp:0"
    )
    assert os.environ[PREFIX + "QUANTIZATION"] == "FP4"
    assert made.qr_comm is made.quantized is not None
    assert made._aiter_qr_rmsnorm_comm is False
    xs = inputs(2)
    with patch.object(cuda_communicator, "should_nccl_symm_mem_allreduce", side_effect=AssertionError):
        assert_same(made.all_reduce(xs[rank]), reference.two_shot(xs, CODECS["FP4"]))
    assert made.all_reduce(torch.full((8,), 2.0**rank)).tolist() == [3.0] * 8
    made.destroy()
    assert made.quantized is None


def test_under_cuda_s_communicator() -> None:
    run_ranks(2, under_cuda_s_communicator)
