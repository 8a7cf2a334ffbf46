# SPDX-License-Identifier: Apache-2.0
"""README and docs stay true: commands exist, files exist, environment variables are those of the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:benchmarks|kernels|ops|tests|configs|tools|examples)/[\w./]+\w)`", text):
        assert (ROOT / path).exists() or (ROOT / "llm_quant_rocm" / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`|\.\.\. )make ([a-z-]+)(?=`|$)", page.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# Those of the vLLM plugin, which tests/engine/test_nvfp4_config.py sets.
PLUGIN_VARIABLES = {f"LLM_QUANT_ROCM_NVFP4{option}" for option in ("", "_PREFILL", "_ACTIVATIONS")}


def test_environment_variables_are_those_of_the_code() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(LLM_QUANT_ROCM_[A-Z0-9_]+)`", page.read_text())}
    operators = set()
    for file in (ROOT / "llm_quant_rocm").rglob("*.py"):
        operators |= set(re.findall(r'choose\("(\w+)"', file.read_text()))
    assert named == {f"LLM_QUANT_ROCM_{operator.upper()}" for operator in operators} | PLUGIN_VARIABLES


@pytest.mark.parametrize("page", ["README.md", "docs/nvfp4.md"])
def test_quoted_messages_are_in_the_code(page: str) -> None:
    """The first column of the table of messages, but for other programs' ("vLLM: ..."), piece by piece."""
    table = (ROOT / page).read_text().split("| the message says |")[1]
    messages = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(messages) >= 5
    # Messages stand in the code as neighbouring literals, cut into lines, and hold braces for what differs.
    files = [*(ROOT / "llm_quant_rocm").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))
    for message in messages:
        for piece in re.split(r"\.\.\.|LLM_QUANT_ROCM_|torch\.float8_|=", message):
            assert piece.strip() in code, f"{message}: {piece!r}"


def test_commands_exist() -> None:
    """Every `llm-quant-rocm COMMAND` of the pages is one."""
    from llm_quant_rocm.cli import app

    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    for page in PAGES:
        for command in re.findall(r"(?:^|`)llm-quant-rocm ([a-z]+)(?: --.*?)?(?=`|$)", page.read_text(), re.MULTILINE):
            assert command in commands, f"{page.name}: {command}"


def test_no_package_host_is_named() -> None:
    hosts = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs|deb\.debian", re.IGNORECASE)
    for file in [*ROOT.glob("*.*"), ROOT / "Makefile", *(ROOT / "docs").glob("*.md"), *(ROOT / "tools").rglob("*.py")]:
        if file.is_file():
            assert not hosts.search(file.read_text(errors="ignore")), file
