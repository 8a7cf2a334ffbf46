# SPDX-License-Identifier: Apache-2.0
"""The compiler of candidates: what fails, and what takes its process with it, is left out and costs nothing else."""

import os

from llm_quant_rocm.tune.search import Compiler


def compile_one(config: int) -> None:
    if config == 3:
        raise ValueError("out of shared memory")
    if config == 5:
        os._exit(1)


def test_what_fails_or_crashes_is_left_out() -> None:
    with Compiler(compile_one) as compiler:
        assert compiler.fit([1, 2, 3]) == [1, 2]
        assert compiler.reasons[3] == "ValueError out of shared memory"
        assert compiler.fit([1, 5, 6, 7]) == [1, 6, 7]
        assert compiler.reasons[5] == "it ends the process that compiles it"
        assert compiler.fit([7, 8]) == [7, 8], "there is a pool again"
