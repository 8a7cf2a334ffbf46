# SPDX-License-Identifier: Apache-2.0
"""The table of docs/amd.md: written, read again, and compared with what is found."""

from pathlib import Path

import pytest

from tests.amd import table, test_matrix

ROW = dict.fromkeys(table.FOUND, "1")
KEY = ("some_kernel", "gfx942", "3.6.0")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "amd.md"
    path.write_text(f"before\n{table.BEGIN}\nsomething old\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "PAGE", path)
    return path


def test_what_is_written_is_read_again_and_the_rest_of_the_page_stays(page: Path) -> None:
    rows = {
        KEY: ROW,
        ("other_kernel", "gfx90a", "3.9.0"): ROW | {"Matrix instructions": "8 `v_mfma_f32`, 4 `v_mfma_i32`"},
    }
    for _ in range(2):
        table.write(rows)
        assert table.read() == rows
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text


@pytest.mark.parametrize("column", table.FOUND)
def test_a_stale_cell_is_found(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_matrix, "DOCUMENTED", {KEY: ROW})
    kernel, arch, triton = KEY
    test_matrix.check_table(triton, arch, kernel, ROW)
    with pytest.raises(AssertionError, match=rf"docs/amd.md is stale, run tools/amd_report.py: .*{column}"):
        test_matrix.check_table(triton, arch, kernel, {column: "2"})


def test_a_missing_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_matrix, "DOCUMENTED", {KEY: ROW})
    with pytest.raises(AssertionError, match="has no row for another_kernel, gfx942, Triton 3.6.0"):
        test_matrix.check_table("3.6.0", "gfx942", "another_kernel", ROW)


def test_a_triton_that_came_later_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_matrix, "DOCUMENTED", {KEY: ROW})
    test_matrix.check_table("4.0.0", "gfx942", "some_kernel", ROW | {"Spilled": "7"})
