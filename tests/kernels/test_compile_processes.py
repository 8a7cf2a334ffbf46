# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled in other processes, and it matters to nobody if these fail."""

from pathlib import Path

import pytest

from tests.amd import isolated, tritons

pytest.importorskip("triton")

from tests.kernels import compile_in_processes as asked

TRITONS = pytest.mark.parametrize("triton", tritons.VERSIONS)


@TRITONS
def test_this_process_reads_what_others_compiled_and_starts_none_for_what_is_there(triton: str, tmp_path: Path) -> None:
    assert isolated.call(triton, asked.compiled, str(tmp_path), (16, 32, 64)) == (1, [True] * 3)
    assert isolated.call(triton, asked.compiled, str(tmp_path), (16, 32)) == (0, [True] * 2)


@TRITONS
def test_a_kernel_that_cannot_be_compiled_is_refused_here(triton: str, tmp_path: Path) -> None:
    assert "N is not 0" in isolated.call(triton, asked.not_compiled, str(tmp_path))


def test_what_is_begun_ends_with_the_processes() -> None:
    """Also that of jobs which cannot even be read."""
    assert asked.after_death([b"no pickle", b"nor this"]) == 4


def test_where_no_process_can_be_started_all_is_left_to_this_one() -> None:
    assert asked.without_processes() == 2


def test_a_compilation_that_is_not_as_expected_is_not_told() -> None:
    assert asked.untold() is None
