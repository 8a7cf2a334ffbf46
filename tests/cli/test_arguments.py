# SPDX-License-Identifier: Apache-2.0
"""Arguments that tune and bench share."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from llm_quant_rocm.cli._app import app
from llm_quant_rocm.cli._arguments import layers, numbers
from llm_quant_rocm.cli._errors import CommandError


@pytest.mark.parametrize("text", ["", "0", "10,", "a", "-1", "1.5"])
def test_what_is_no_list_of_numbers(text: str) -> None:
    with pytest.raises(CommandError, match=f"--ms {text}: it must be positive whole numbers"):
        numbers("--ms", text)


def test_numbers_rise_and_are_counted_once() -> None:
    assert numbers("--ms", "64, 10,64") == (10, 64)


def test_layers_by_pattern() -> None:
    assert list(layers(None, 1, ["qwen3-*"])) == ["qwen3-qkv", "qwen3-o"]
    assert len(layers(None, 1, None)) >= 10


def test_the_same_weight_is_named_once_and_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_quant_rocm.tune.shapes.WELL_KNOWN", {"a-o": (8, 8), "b-qkv": (24, 8), "b-o": (8, 8)})
    assert layers(None, 1, None) == {"a-o": (8, 8), "b-qkv": (24, 8)}
    assert layers(None, 1, ["b-*"]) == {"b-qkv": (24, 8), "b-o": (8, 8)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ', r"config\.json is no JSON \(Expecting value"),
        (b"\xe8", "is no JSON"),
        (b"[1]", "holds no JSON object"),
    ],
    ids=["cut", "binary", "list"],
)
def test_a_broken_config_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CommandError, match=message):
        layers(tmp_path, 1, None)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_key_value_heads": "8"}, "TypeError"),
        ({"text_config": [1]}, "AttributeError"),
    ],
    ids=["zero", "text", "list"],
)
def test_a_config_that_cannot_be_understood_is_named(tmp_path: Path, config: dict[str, Any], error: str) -> None:
    llama = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(llama | config))
    with pytest.raises(CommandError, match=f"cannot be understood .{error}.*: download the checkpoint again, or cor"):
        layers(tmp_path, 1, None)


def test_the_help_of_a_command_begins_with_one_line() -> None:
    """typer breaks it where it is broken here, whatever the terminal's width."""
    group = get_command(app)
    commands = {**group.commands, **group.commands["bench"].commands}  # type: ignore[attr-defined]
    assert len(commands) == 12
    assert [name for name, command in commands.items() if "\n" in command.help.partition("\n\n")[0]] == []
