# SPDX-License-Identifier: Apache-2.0
"""Which versions of other packages count as supported."""

import pytest

from llm_quant_rocm.versions import SUPPORTED, Range


@pytest.mark.parametrize("version", ["0.26", "0.26.0", "0.26.0rc1", "0.32.0+cpu", "0.33.9", "v0.27.1"])
def test_inside(version: str) -> None:
    assert Range("0.26", "0.34", ()).holds(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.34", "0.34.0", "1.0", "0.3", "0.1.dev12+g1234", "dev", ""])
def test_outside(version: str) -> None:
    assert not Range("0.26", "0.34", ()).holds(version)


def test_tested_versions_count_by_their_leading_numbers() -> None:
    known = Range("0.26", "0.34", ("0.26.0", "0.32"))
    assert known.was_tested("0.26.0+cu130")
    assert known.was_tested("0.32.1")
    assert not known.was_tested("0.26.1")


def test_no_end() -> None:
    assert Range("2.11", None, ()).holds("3.0")
    assert not Range("2.11", None, ()).holds("2.9.1")
    assert str(Range("2.11", None, ())) == "2.11 and newer"


@pytest.mark.parametrize("package", list(SUPPORTED))
def test_what_was_tested_is_supported(package: str) -> None:
    assert all(SUPPORTED[package].holds(version) for version in SUPPORTED[package].tested)
