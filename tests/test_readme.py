# SPDX-License-Identifier: Apache-2.0
"""README and docs stay true: files and make targets exist. tests/test_docs.py has commands, messages and variables."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
    for path in re.findall(r"`((?:benchmarks|kernels|ops|tests|configs|tools|examples)/[\w./]+\w)`", text):
        assert (ROOT / path).exists() or (ROOT / "llm_quant_rocm" / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`|\.\.\. )make ([a-z-]+)(?=`|$)", page.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_no_package_host_is_named() -> None:
    hosts = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs|deb\.debian", re.IGNORECASE)
    for file in [*ROOT.glob("*.*"), ROOT / "Makefile", *(ROOT / "docs").glob("*.md"), *(ROOT / "tools").rglob("*.py")]:
        if file.is_file():
            assert not hosts.search(file.read_text(errors="ignore")), file
