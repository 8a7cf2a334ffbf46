# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a whole vLLM, around engines that are made up."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import vllm_engine


def test_a_variant_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def process(script: str, *arguments: str, **variables: str) -> tuple[dict[str, Any], list[str]]:
        if "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION" in variables and "LLM_QUANT_ROCM_FUSION" in variables:
            raise RuntimeError("--run fusion 2 failed with status 1")
        return {"arguments": arguments}, ["norm fusion: on"]

    monkeypatch.setattr(vllm_engine, "logged_process", process)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.26.0"))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("COMMIT", "abc1234")
    with pytest.raises(SystemExit, match="apart_quick_reduce: --run fusion 2 failed with status 1"):
        vllm_engine.measure_fusion(2, ["apart", "apart_quick_reduce", "fused"], is_demo=False)
    found = json.loads((tmp_path / "vllm_fusion_2_ranks_sm_90.json").read_text())
    assert {"apart", "fused"} <= set(found["variants"]) and found["vllm"] == "0.26.0"
    assert found["variants"]["fused"]["commit"] == "abc1234"
    assert found["variants"]["fused"]["log"] == ["norm fusion: on"]
