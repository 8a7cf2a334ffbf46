# SPDX-License-Identifier: Apache-2.0
"""Every `python -m sglang.launch_server ...` of the pages is a command line of SGLang's, our methods registered."""

import argparse

import pytest
from sglang.srt.server_args import ServerArgs

from llm_quant_rocm_sglang import register
from tests.test_docs import COMMANDS, program_of

SERVER = ["-m", "sglang.launch_server"]
LINES = [words[2:] for _, command in COMMANDS if (words := program_of(command)[2])[:2] == SERVER]


def parser() -> argparse.ArgumentParser:
    register()
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def test_sglang_takes_its_commands() -> None:
    assert LINES
    for line in LINES:
        assert parser().parse_args(line).model_path


@pytest.mark.parametrize("wrong", ["--quantization ptpc_fp9", "--tensor-size 2"])
def test_a_wrong_command_is_found(wrong: str) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--model-path", "MODEL", *wrong.split()])
