# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and engine runs that the tests share: an engine takes seconds, where it is a fork (forks.py)."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from llm_quant_rocm.environment import ERRORS

# Of vLLM, for all engines at once; plugins are none of it.
IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.model_loader.weight_utils",
    "vllm.v1.worker.cpu_worker",
    "torch._inductor.cpu_vec_isa:pick_vec_isa",  # which compiles ten programs to find out
)
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

if find_spec("vllm"):
    import checkpoints
    import engines
    import forks
    import nvfp4_checkpoints


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("vllm"):
        forks.start(config, engines.environment(), *IMPORTED)


@pytest.fixture(autouse=True)
def plugin_leaves_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM loads the plugin into this process, it sets a variable, which other tests would find."""
    monkeypatch.setenv(ERRORS, "")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library's commands start is a fork of a process that has imported vLLM. They start eager engines."""
    monkeypatch.setattr(sys, "executable", forks.python())
    for name, value in engines.EAGER.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def dense_checkpoint(folder: Path) -> Path:
    return checkpoints.dense(folder / "dense")


@pytest.fixture(scope="session")
def moe_checkpoint(folder: Path) -> Path:
    return checkpoints.moe(folder / "moe")


@pytest.fixture(scope="session")
def dense(folder: Path, dense_checkpoint: Path) -> "engines.Result":
    """The dense checkpoint, quantized by us."""
    return succeed(engines.run(folder / "dense-ptpc", dense_checkpoint, quantization="ptpc_fp8"))


@pytest.fixture(scope="session")
def moe(folder: Path, moe_checkpoint: Path) -> "engines.Result":
    """The mixture-of-experts checkpoint, quantized by us, in fp16."""
    return succeed(engines.run(folder / "moe-ptpc", moe_checkpoint, quantization="ptpc_fp8", dtype="float16"))


@pytest.fixture(scope="session")
def nvfp4_dense(dense_checkpoint: Path) -> "nvfp4_checkpoints.Quantized":
    """The dense checkpoint in NVFP4, its fused shards with unequal global scales."""
    return nvfp4_checkpoints.Quantized(dense_checkpoint)


@pytest.fixture(scope="session")
def nvfp4_moe(moe_checkpoint: Path) -> "nvfp4_checkpoints.Quantized":
    """The mixture-of-experts checkpoint in NVFP4, gate and up of each expert with unequal global scales."""
    return nvfp4_checkpoints.Quantized(moe_checkpoint)


@pytest.fixture(scope="session")
def nvfp4_modelopt(folder: Path, nvfp4_dense: "nvfp4_checkpoints.Quantized") -> Path:
    """ModelOpt's layout of the dense NVFP4 checkpoint, W4A4."""
    return nvfp4_dense.write_modelopt(folder / "nvfp4-modelopt")


@pytest.fixture(scope="session")
def nvfp4_served(folder: Path, nvfp4_modelopt: Path) -> "engines.Result":
    """It, served without a flag."""
    return succeed(engines.run(folder / "nvfp4-modelopt-run", nvfp4_modelopt))


def succeed(result: "engines.Result") -> "engines.Result":
    assert result.returncode == 0, result.log[-6000:]
    return result
