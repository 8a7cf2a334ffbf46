# SPDX-License-Identifier: Apache-2.0
"""What a group's ranks say of each other: who is on whose host, and whose memory a GPU reaches."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from llm_quant_rocm.comm import group, process_group, roll_call
from llm_quant_rocm.comm.group import better_left_to, hosts_of, unreachable
from llm_quant_rocm.comm.policy import CODEC_BYTES, ENGINE, Settings
from llm_quant_rocm.formats.wire import CODECS
from tests.comm.processes import run_ranks

GROUP: Any = None
VISIBLE = "CUDA_VISIBLE_DEVICES"


def test_hosts_by_the_ranks_of_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6, 7])
    in_turns = [[True, False, True, False], [False, True, False, True]]
    assert hosts_of(GROUP, lambda group, source_rank: in_turns[source_rank]) == [[4, 6], [5, 7]]
    # An engine that cannot say denies every rank's host, its own as well.
    answers = iter([[False] * 4] * 4)
    assert hosts_of(GROUP, lambda group, source_rank: next(answers)) == [[4], [5], [6], [7]]


def test_only_of_gpus_that_this_rank_sees_is_the_driver_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other visible devices count their GPUs from another one on."""
    asked = []

    def reaches(device: Any, other: int) -> bool:
        asked.append(other)
        return other != 2

    monkeypatch.setenv(VISIBLE, "0,1,2")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    here, facts = torch.device("cuda", 0), [("0,1,2", 0), ("0,1,2", 1), ("3,4,5", 2), (None, 2)]
    assert unreachable(here, VISIBLE, facts) is None
    assert asked == [1]
    assert unreachable(here, VISIBLE, [*facts, ("0,1,2", 2)]) == "GPU 0 does not reach the memory of GPU 2"


@pytest.mark.parametrize(("measured", "least", "ours"), [(False, None, False), (True, None, True), (False, 0, True)])
def test_an_engines_own_serves_until_somebody_measured(measured: bool, least: int | None, ours: bool) -> None:
    policy: Any = SimpleNamespace(measured=measured, settings=SimpleNamespace(min_bytes=least))
    assert (better_left_to(SimpleNamespace(disabled=False), policy, "X") is None) == ours
    assert better_left_to(None, policy, "X") is None


@pytest.mark.parametrize(
    ("least", "serves", "ours"), [(None, True, False), (None, False, True), (None, None, True), (0, True, True)]
)
def test_small_messages_are_the_engines_where_it_serves_them(
    least: int | None, serves: bool | None, ours: bool
) -> None:
    """Unless a least size is wished. What the policy leaves to the engine is not asked about."""
    policy: Any = MagicMock(settings=Settings(CODECS["FP4"], min_bytes=least))
    custom = None if serves is None else MagicMock(disabled=False, **{"should_custom_ar.return_value": serves})
    reduce = group.GroupReduce(MagicMock(), policy, None, custom)
    large = torch.empty(CODEC_BYTES // 2, dtype=torch.bfloat16, device="meta")
    assert reduce.should_quick_allreduce(large[8:]) == ours
    assert reduce.should_quick_allreduce(large)
    policy.choose.return_value = ENGINE
    if custom is not None:
        custom.should_custom_ar.side_effect = AssertionError
    assert not reduce.should_quick_allreduce(large[8:])


@pytest.mark.parametrize("differs", [None, "settings", "steps"])
def test_ranks_agree_before_they_serve(
    differs: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of crossovers that one host alone has would send a message two ways."""

    def answers(mine: tuple[Any, ...], over: Any) -> list[Any]:
        refusal, settings, steps, facts = mine
        theirs = (replace(settings, min_bytes=1) if differs == "settings" else settings, steps)
        return [mine, (refusal, theirs[0], steps[:1] if differs == "steps" else steps, facts)]

    monkeypatch.setattr(group, "dist", MagicMock(**{"get_world_size.return_value": 2, "get_rank.return_value": 0}))
    monkeypatch.setattr(group, "answers", answers)
    monkeypatch.setattr(group, "raised_by_all", nullcontext)
    monkeypatch.setattr(group, "await_everyone", lambda *given: None)
    monkeypatch.setattr(group, "hosts_of", lambda *given: [[0, 1]])
    monkeypatch.setattr(group, "first_refusal", lambda refusal, over: refusal)
    monkeypatch.setattr(group, "_transport", MagicMock())
    members: Any = SimpleNamespace(
        engine="vLLM", name="tp:0", cpu_group=None, device=torch.device("cpu"), dtype=None, same_host=None,
        visible_devices="ABSENT", custom=None,
    )  # fmt: skip
    with caplog.at_level("INFO", logger="llm_quant_rocm"):
        made = group.connect(members, Settings(CODECS["FP4"], min_bytes=0), lambda policy: None, MagicMock())
    assert (made is None) == (differs is not None)
    assert ("the ranks have different settings or measured crossovers" in caplog.text) == (differs is not None)


def test_groups_for_several_hosts_have_the_engines_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within it a lost rank is named."""
    levels = MagicMock(return_value=(None, None))
    monkeypatch.setattr(process_group, "two_level_groups", levels)
    monkeypatch.setattr(process_group, "RollCall", MagicMock())
    monkeypatch.setattr(process_group.dist, "get_backend", lambda group: "gloo")
    members: Any = SimpleNamespace(device_group=GROUP, timeout=timedelta(seconds=7))
    group._transport(members, False, [[0], [1]])
    levels.assert_called_once_with([[0], [1]], "gloo", members.timeout)


def members_on_cpus() -> group.Members:
    return group.Members(
        "an engine", "tp:0", dist.group.WORLD, dist.group.WORLD, torch.device("cpu"),
        lambda group, source_rank: [True] * dist.get_world_size(group), VISIBLE,
    )  # fmt: skip


def connect_with_a_broken_file(rank: int) -> None:
    """On one host alone: the others would wait for its ranks."""
    broken = ValueError("sm_90.json is no file of crossovers")
    files = {"side_effect": broken} if rank == 1 else {"wraps": group.Policy}
    words = f"^{'' if rank == 1 else 'rank 1: '}{broken}$"
    with patch.object(group, "Policy", **files), pytest.raises(ValueError, match=words):
        group.connect(members_on_cpus(), Settings(CODECS["FP4"]), lambda policy: None, group.GroupReduce)
    dist.barrier()


def test_a_broken_file_ends_all_ranks() -> None:
    run_ranks(2, connect_with_a_broken_file)


def connect_without_a_rank(rank: int) -> None:
    """A rank of another host, where no codec is set, makes its group and goes on: the others end with a sentence."""
    members = members_on_cpus()
    wishes = Settings(CODECS["FP4"], min_bytes=0)
    for _ in range(2):
        assert group.connect(members, wishes, lambda policy: None, group.GroupReduce) is not None
    roll_call.ARRIVAL_SECONDS = 1.0
    if rank != 1:
        words = (
            "^quantized all-reduce: rank 1 of the group tp:0 did not come within 1 seconds: "
            "set the same environment variables on all hosts$"
        )
        with pytest.raises(RuntimeError, match=words):
            group.connect(members, wishes, lambda policy: None, group.GroupReduce)
    dist.barrier()


def test_nobody_waits_long_for_a_rank_without_a_codec() -> None:
    run_ranks(3, connect_without_a_rank)
