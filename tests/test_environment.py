# SPDX-License-Identifier: Apache-2.0
"""llm_quant_rocm/environment.py lists every variable that the code reads, with the values that its readers know."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from llm_quant_rocm import environment
from llm_quant_rocm.comm.policy import Settings
from llm_quant_rocm.environment import VARIABLES
from llm_quant_rocm.formats.wire import CODECS

ROOT = Path(__file__).parent.parent
FILES = [
    file
    for folder in (ROOT / "llm_quant_rocm", ROOT / "plugins")
    for file in sorted(folder.rglob("*.py"))
    if file.name != "environment.py"
]
OURS = re.compile(r"\b(?:LLM_QUANT_ROCM|(?:VLLM_)?ROCM_QUICK_REDUCE)_[A-Z0-9_]*[A-Z0-9]\b")


# Other programs' variables, by names that those programs say.
THEIRS = {
    "os.environ.get(current_platform.device_control_env_var)",
    "os.environ.get(members.visible_devices)",
    "os.environ.get(variable)",
}


def direct_reads(tree: ast.Module) -> Iterator[str]:
    """Expressions that take a variable out of os.environ; to hand the whole of it on is none."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node.value).endswith("environ")
        ):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and re.search(r"(^|\.)(environ\.\w+|getenv)$", ast.unparse(node.func)):
            yield ast.unparse(node)
        if isinstance(node, ast.Compare) and ast.unparse(node.comparators[-1]).endswith("environ"):
            yield ast.unparse(node)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_variables_are_read_in_one_place(file: Path) -> None:
    text = file.read_text()
    assert set(direct_reads(ast.parse(text))) <= THEIRS
    assert set(OURS.findall(text)) <= set(VARIABLES)
    # What vLLM reads for us.
    assert set(re.findall(r"\benvs\.([A-Z_]+)", text)) <= set(VARIABLES)


def test_what_engines_are_asked_about_themselves_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    code = "".join(file.read_text() for file in FILES if file.is_relative_to(ROOT / "plugins"))
    asked = {*re.findall(r'(?:env_var\(|getattr\(envs, )"(\w+)"', code), *re.findall(r'"(\w+_VISIBLE_DEVICES)"', code)}
    assert {"SGLANG_USE_AITER", "VLLM_MOE_SKIP_PADDING", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} <= asked
    assert [name for name in sorted(asked) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "code", ["os.environ['A']", "os.environ.get('A')", "environ.get('A')", "os.getenv('A')", "'A' in os.environ"]
)
def test_a_direct_read_is_found(code: str) -> None:
    assert list(direct_reads(ast.parse(code))) == [code]


def test_every_operator_with_a_choice_has_its_variable() -> None:
    operators = {}
    for file in sorted((ROOT / "llm_quant_rocm" / "ops").glob("*.py")):
        for literal in re.findall(r"\breturn choose\((\S+), BACKENDS", file.read_text()):
            module = import_module(f"llm_quant_rocm.ops.{file.stem}")
            name = module.NAME if literal == "NAME" else ast.literal_eval(literal)
            operators[environment.backend_of(name)] = tuple(backend.name for backend in module.BACKENDS)
    assert len(operators) >= 7
    assert {name: VARIABLES[name].values for name in operators} == operators


def test_the_codecs_are_those_of_the_wire() -> None:
    variable = VARIABLES[f"{environment.QUICK_REDUCE}QUANTIZATION"]
    assert set(variable.values) == {*CODECS, "NONE"}
    for value in variable.values:
        Settings.from_environment({variable.name: value})


def test_read_gives_what_is_set() -> None:
    name = environment.NVFP4
    assert environment.read(name, {name: "0"}) == "0"
    assert environment.read(name, {name: ""}) == ""
    assert environment.read(name, {}) is None


@pytest.mark.parametrize(("value", "on"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_a_switch(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv(environment.NVFP4, raising=False)
    if value is not None:
        monkeypatch.setenv(environment.NVFP4, value)
    assert environment.switched_on(environment.NVFP4) is on


@pytest.mark.parametrize("value", ["off", "true"])
def test_a_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(environment.NVFP4, value)
    with pytest.raises(ValueError, match="LLM_QUANT_ROCM_NVFP4 is 0 or 1, not"):
        environment.switched_on(environment.NVFP4)


def test_a_value_that_is_none_is_refused_with_those_that_are() -> None:
    variable = VARIABLES[f"{environment.NVFP4}_PREFILL"]
    assert variable.refusal("fp8") is None
    assert variable.refusal("int8") == "LLM_QUANT_ROCM_NVFP4_PREFILL=int8: it must be exact or fp8"
    assert VARIABLES["XDG_CACHE_HOME"].refusal("/anything") is None
