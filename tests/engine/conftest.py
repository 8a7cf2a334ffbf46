# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and engine runs that the tests share: an engine takes a quarter of a minute to start."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

if find_spec("vllm"):
    import checkpoints
    import engines


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


def succeed(result: "engines.Result") -> "engines.Result":
    assert result.returncode == 0, result.log[-6000:]
    return result
