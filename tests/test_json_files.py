# SPDX-License-Identifier: Apache-2.0
"""A JSON file of a checkpoint, whole and broken."""

import subprocess
import sys
from pathlib import Path

import pytest

from llm_quant_rocm.json_files import json_object


def test_an_object_in_any_language(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes('{"name": "模型"}'.encode())
    assert json_object(file) == {"name": "模型"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"config\.json is no JSON \(Expecting value.*: download the checkpoint again"),
        (b'{"a": ', r"config\.json is no JSON \(Expecting value"),
        (b"\xe8", r"config\.json is no JSON \('utf-8' codec"),
        (b"[1]", r"config\.json holds no JSON object: download the checkpoint again"),
        (b"null", "holds no JSON object"),
    ],
    ids=["empty", "cut", "binary", "list", "null"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        json_object(tmp_path / "config.json")


def test_the_commands_read_one_without_the_packages_of_checkpoints() -> None:
    """`tune` and `bench` read a model's config.json where safetensors and compressed-tensors are not installed."""
    program = """
import sys
sys.modules["safetensors"] = sys.modules["compressed_tensors"] = None  # importing them fails
import llm_quant_rocm.cli._arguments
"""
    subprocess.run([sys.executable, "-c", program], check=True)
