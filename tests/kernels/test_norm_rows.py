# SPDX-License-Identifier: Apache-2.0
"""Every byte of a row's results, and of its way between ranks, is written exactly once: whatever width and launch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_quant_rocm.formats.wire import BLOCK
from llm_quant_rocm.kernels.reduce_norm_quant import MAX_COLUMNS, Config

ROOT = Path(__file__).parent.parent.parent


def interpreted(*arguments: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpret_norm_rows", *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_every_byte_is_written_once() -> None:
    found = interpreted()
    assert found["cases"] >= 30
    assert not found["failures"], "\n".join(f"{case}: {wrong}" for case, wrong in found["failures"].items())


def test_bytes_that_are_not_written_are_found() -> None:
    found = interpreted("planted")
    assert found["cases"] and len(found["failures"]) == found["cases"]


@pytest.mark.parametrize("threads", [64, 128, 256, 512, 1024])
def test_blocks_cover_every_width(threads: int) -> None:
    """Blocks are powers of two and whole buffers of the wire, as many as a row needs and no more."""
    config = Config(threads, 1)
    for columns in range(16, MAX_COLUMNS + 1, 16):
        block = config.block(columns)
        count = -(-columns // block)
        assert block & (block - 1) == 0 and block % BLOCK == 0
        assert block <= threads * 8 and (count - 1) * block < columns <= count * block
