# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that the tests share. They run where SGLang is, as `make test` runs them:

PYTHONPATH=tests/engine_sglang/stand_ins:.venv/sglang .venv/bin/python -m pytest tests/engine_sglang
"""

import inspect
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]

if find_spec("sglang"):
    import torch

    if not torch.cuda.is_available():
        os.environ["SGLANG_PLATFORM"] = "llm_quant_rocm_test"  # for tests that import SGLang themselves
    sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
    import checkpoints
    import forks
    import nvfp4_checkpoints
    import servers

# Of SGLang, for all servers at once; plugins are none of it.
IMPORTED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
)
DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def share(
    monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, kv_rank: int | None = None, kv_ranks: int | None = None
) -> dict[str, Any]:
    """The arguments that give a linear layer one rank's share, if need be another one of k and v, in the words of this
    version of SGLang."""
    from sglang.srt.layers import linear

    known = inspect.signature(linear.QKVParallelLinear).parameters
    if "parallel_group" in known:  # newer than 0.5.21
        places = {"attn_tp": (rank, ranks), "tp": (kv_rank, kv_ranks)}
        groups = {name: SimpleNamespace(rank_in_group=at, world_size=size) for name, (at, size) in places.items()}
        monkeypatch.setattr(linear, "_resolve_linear_group", groups.get)
        return {"parallel_group": "attn_tp"} | ({"kv_parallel_group": "tp"} if kv_ranks else {})
    arguments = {"tp_rank": rank, "tp_size": ranks}
    if kv_ranks and "kv_tp_rank" in known:
        arguments |= {"kv_tp_rank": kv_rank, "kv_tp_size": kv_ranks}
    elif kv_ranks and (kv_rank, kv_ranks) != (rank, ranks):
        pytest.skip("this SGLang shares k and v out as q")
    return arguments


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("sglang"):
        forks.start(config, servers.environment(), *IMPORTED)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def moe_checkpoint(folder: Path) -> Path:
    """Experts in every layer: SGLang's Qwen3-MoE has no others. Of a size that it need not pad on CPUs."""
    return checkpoints.moe(folder / "moe", dense_layers=(), inner=128)


@pytest.fixture(scope="session")
def nvfp4_moe(moe_checkpoint: Path) -> "nvfp4_checkpoints.Quantized":
    """It in NVFP4, gate and up of each expert, and q, k and v, with unequal global scales."""
    return nvfp4_checkpoints.Quantized(moe_checkpoint)
