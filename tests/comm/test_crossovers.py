# SPDX-License-Identifier: Apache-2.0
"""From measured times to crossovers that the policy reads."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from llm_quant_rocm.comm import policy
from llm_quant_rocm.comm.crossovers import crossovers, merged
from llm_quant_rocm.comm.policy import Algorithm, Policy, Settings
from llm_quant_rocm.formats.wire import codec_named

ROWS = [
    # Ours would win by less than the tolerance.
    {"bytes": 4096, "us": {"NCCL": 9.0, "symm one-shot": 5.1, "FP one-shot": 5.0, "FP4 one-shot": 5.0}},
    {"bytes": 65536, "us": {"NCCL": 9.0, "symm one-shot": 7.0, "FP one-shot": 6.0, "FP4 one-shot": 5.9, "FP4": 9.0}},
    {"bytes": 1 << 20, "us": {"NCCL": 19.0, "symm two-shot": 10.0, "FP one-shot": 9.0, "FP4 one-shot": 7.0}},
    {"bytes": 2 << 20, "us": {"NCCL": 28.0, "symm two-shot": 13.0, "FP": 16.0, "FP4": 13.0, "FP4 one-shot": 14.0}},
    {"bytes": 4 << 20, "us": {"NCCL": 40.0, "symm two-shot": 20.0, "FP": 22.0, "FP4": 16.0}},
    {"bytes": 8 << 20, "us": {"NCCL": 60.0, "symm two-shot": 36.0, "FP": 40.0, "FP4": 22.0}},
]
ENVIRONMENT = {"device": "2 x a GPU", "torch": "2", "triton": "3", "commit": "abc"}


def test_the_fastest_serves_unless_something_more_exact_is_nearly_as_fast() -> None:
    entry = crossovers(ROWS, 2, "FP4")
    assert (entry["world_size"], entry["dtype"], entry["codec"]) == (2, "bfloat16", "FP4")
    assert entry["steps"] == [
        {"from_bytes": 0, "algorithm": "engine"},
        {"from_bytes": 65536, "algorithm": "one_shot", "codec": "FP"},
        {"from_bytes": 1 << 20, "algorithm": "one_shot", "codec": "FP4"},
        {"from_bytes": 2 << 20, "algorithm": "engine"},
        {"from_bytes": 4 << 20, "algorithm": "two_shot", "codec": "FP4"},
    ]


@pytest.mark.parametrize(("ours", "algorithm"), [(97.2, "engine"), (97.0, "two_shot")])
def test_what_changes_less_may_be_three_percent_slower(ours: float, algorithm: str) -> None:
    entry = crossovers([{"bytes": 4096, "us": {"NCCL": 100.0, "FP4": ours}}], 2, "FP4")
    assert [step["algorithm"] for step in entry["steps"]] == [algorithm]


@pytest.mark.parametrize("codec", ["FP4", "INT8"])
def test_the_policy_serves_by_them(codec: str, tmp_path: Path) -> None:
    file = tmp_path / "sm_90.json"
    file.write_text(json.dumps(merged(None, [crossovers(ROWS, 2, name) for name in ("FP4", "INT8")], ENVIRONMENT)))
    with patch.object(policy, "cache_file", return_value=file):
        found = Policy(Settings(codec_named(codec)), 2, "sm_90")
    assert found.measured
    assert found.choose(65536, torch.bfloat16).algorithm is Algorithm.ONE_SHOT
    large = found.choose(8 << 20, torch.float16)
    assert large.algorithm is (Algorithm.TWO_SHOT if codec == "FP4" else Algorithm.ENGINE)


def test_other_numbers_of_ranks_and_codecs_are_kept() -> None:
    measured = [crossovers(ROWS, world, codec) for world, codec in ((2, "FP4"), (2, "INT8"), (4, "FP4"))]
    before = merged(None, measured, {"commit": "old"})
    after = merged(before, [crossovers(ROWS[:2], 2, "FP4"), crossovers(ROWS, 2, "INT4")], ENVIRONMENT)
    here, before_here = ENVIRONMENT["commit"], "old"
    assert [(e["world_size"], e["codec"], e["measured_on"]["commit"]) for e in after["crossovers"]] == [
        (2, "FP4", here),
        (2, "INT4", here),
        (2, "INT8", before_here),
        (4, "FP4", before_here),
    ]
    assert len(after["crossovers"][0]["steps"]) == 2 and after["crossovers"][2:] == before["crossovers"][1:]
