# SPDX-License-Identifier: Apache-2.0
"""README and docs stay true: commands parse, Python blocks run, messages and variables are those of the code."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llm_quant_rocm.environment import VARIABLES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [*sorted((ROOT / "llm_quant_rocm").rglob("*.py")), *sorted((ROOT / "plugins").rglob("*.py"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, first line, language, text, and why it is not run (an HTML comment above it)."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> Iterator[Block]:
    fence = re.compile(r"(?:<!-- not run: (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text()
        for found in fence.finditer(text):
            line = text[: found.start(3)].count("\n")
            yield Block(page, line, found[2], found[3], found[1])


BLOCKS = list(blocks())

# --- commands

# Who checks a program's arguments: a function of (arguments, a folder), which raises AssertionError.
CHECKS: dict[str, Callable[[list[str], Path], None]] = {}
# Other people's programs, of which the first argument alone is checked.
FOREIGN = {"pip": {"install", "uninstall"}, "hf": {"download"}}
# Variables of other programs that commands may set.
FOREIGN_VARIABLES = {"PIP_EXTRA_INDEX_URL", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}


def checks(program: str) -> Callable[[Callable[[list[str], Path], None]], Callable[[list[str], Path], None]]:
    def register(function: Callable[[list[str], Path], None]) -> Callable[[list[str], Path], None]:
        CHECKS[program] = function
        return function

    return register


# Of Qwen3-30B-A3B: the demo model has no experts, nor heads for 8 GPUs.
SHAPE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip


def filled_in(arguments: list[str], folder: Path) -> list[str]:
    """With a checkpoint for MODEL, the config.json of one for that of --model, of which shapes alone are read, and a
    new folder for other names in capitals."""
    known = {"MODEL": str(ROOT / "examples" / "demo_model"), "COMMAND": "doctor", "FP4": "FP4"}
    filled = [known.get(a) or (str(folder / a) if re.fullmatch(r"[A-Z][A-Z0-9-]+", a) else a) for a in arguments]
    for place, before in enumerate(filled[:-1], 1):
        if before == "--model":
            filled[place] = str(folder / "config.json")
            (folder / "config.json").write_text(json.dumps(SHAPE))
    return filled


@checks("llm-quant-rocm")
def check_ours(arguments: list[str], folder: Path) -> None:
    """By the command's own parser."""
    from typer.main import get_command

    from llm_quant_rocm.cli._app import app

    arguments = filled_in(arguments, folder)
    group = get_command(app)
    if not arguments or arguments[0].startswith("-"):
        assert arguments in (["--help"], ["--version"]), arguments
        return
    name, *rest = arguments
    command = group.commands.get(name)
    assert command is not None, f"llm-quant-rocm has no command {name}: {', '.join(group.commands)}"
    if hasattr(command, "commands"):  # a group parses its own options alone
        assert rest and rest[0] in command.commands, f"llm-quant-rocm {name} has {', '.join(command.commands)}"
        name, *rest = rest
        command = command.commands[name]
    try:
        command.make_context(name, rest)
    except Exception as error:  # the parser's own, of whichever click typer brings
        if getattr(error, "exit_code", None) == 0:  # --help
            return
        raise AssertionError(f"llm-quant-rocm {shlex.join(arguments)}: {error!r}") from error


@checks("make")
def check_make(arguments: list[str], folder: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in arguments:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make has no target {target}"


@checks("python")
def check_python(arguments: list[str], folder: Path) -> None:
    """A script of ours, that compiles and names the options; or a module with -m, of ours or of an engine that is not
    here."""
    if arguments[0] == "-m":
        module = arguments[1]
        top = module.partition(".")[0]
        assert top in ("sglang", "pytest", "venv") or importlib.util.find_spec(module), module
        return
    script = ROOT / arguments[0]
    assert script.is_file(), arguments[0]
    text = script.read_text()
    compile(text, str(script), "exec")
    for option in arguments[1:]:
        assert not option.startswith("--") or f'"{option}"' in text, f"{arguments[0]} has no {option}"


@checks("sh")
def check_script(arguments: list[str], folder: Path) -> None:
    subprocess.run(["sh", "-n", str(ROOT / arguments[0])], check=True)


def commands_of(text: str) -> Iterator[str]:
    """The commands of a block: lines, joined where they end in a backslash, without comments."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        line = re.sub(r"(^|\s{2,})#.*$", "", line).removeprefix("$ ").strip()
        if line:
            yield line


def program_of(command: str) -> tuple[dict[str, str], str, list[str]]:
    """The variables that a command sets, its program and its arguments."""
    words = shlex.split(command)
    variables = {}
    while words and re.match(r"[A-Z][A-Z0-9_]*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program = Path(words[0]).name if words else ""
    return variables, {"python3": "python"}.get(program, program), words[1:]


def commands() -> list[tuple[str, str]]:
    """(where, command) of every command in a block, and of every one in the text that starts with our own program's or
    an engine's name."""
    found = []
    for block in BLOCKS:
        if block.not_run or block.language not in ("", "bash", "sh"):
            continue
        for command in commands_of(block.text):
            try:
                program = program_of(command)[1]
            except ValueError:
                program = ""
            # A block without a language may be a log or a formula.
            if block.language or program in (*CHECKS, *FOREIGN, "vllm"):
                found.append((str(block), command))
    for page in PAGES:
        # Blocks are above; a row that begins with code quotes a message.
        text = re.sub(r"^```.*?^```$|^\| `.*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for command in re.findall(r"`((?:llm-quant-rocm|vllm serve|make|python) [^`\n|]+)`", text):
            found.append((page.name, command.removesuffix(" ...")))
    return list(dict.fromkeys(found))


COMMANDS = commands()


@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=[f"{where} {command}" for where, command in COMMANDS])
def test_a_command_is_one(where: str, command: str, tmp_path: Path) -> None:
    variables, program, arguments = program_of(command)
    for name, value in variables.items():
        assert name in VARIABLES or name in FOREIGN_VARIABLES, name
        assert name not in VARIABLES or VARIABLES[name].refusal(value) is None, command
    if program in FOREIGN:
        assert arguments[0] in FOREIGN[program], command
    elif program != "vllm":  # test_vllm_takes_its_commands
        assert program in CHECKS, f"{where}: nothing checks {program!r}; add it to this test"
        CHECKS[program](arguments, tmp_path)


def test_there_are_commands() -> None:
    programs = {program_of(command)[1] for _, command in COMMANDS}
    assert {"llm-quant-rocm", "vllm", "make", "pip", "python"} <= programs


@pytest.mark.parametrize(
    "command",
    ["llm-quant-rocm docter", "llm-quant-rocm doctor --json=5", "llm-quant-rocm doctor MODEL --tp two", "make dmeo",
     "llm-quant-rocm bench gemm --plott x.png", "llm-quant-rocm bench gem", "llm-quant-rocm bench --json",
     "python benchmarks/regenerate.py --lst", "python examples/gone.py"],
)  # fmt: skip
def test_a_wrong_command_is_found(command: str, tmp_path: Path) -> None:
    _, program, arguments = program_of(command)
    with pytest.raises(AssertionError):
        CHECKS[program](arguments, tmp_path)


def runs_here(arguments: list[str]) -> bool:
    """Whether a command of ours ends in seconds without an engine. Those that start one run in tests/engine and in
    `make demo`, doctor's --engines in tests/cli."""
    name, *rest = arguments or [""]
    return name in ("doctor", "quantize", "tune") and "--engines" not in rest or name == "bench" and rest[0] != "serve"


OURS = sorted({command for _, command in COMMANDS if program_of(command)[1] == "llm-quant-rocm"})
OURS = [command for command in OURS if runs_here(program_of(command)[2])]


@pytest.mark.parametrize("command", OURS)
def test_a_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU, where `tune` and `bench` say what they want instead."""
    torch = pytest.importorskip("torch")
    from typer.testing import CliRunner

    from llm_quant_rocm.cli._app import app

    arguments = filled_in(program_of(command)[2], tmp_path)
    if arguments[0] in ("tune", "bench") and torch.cuda.is_available():
        pytest.skip("tests/gpu measures")
    if arguments[0] == "quantize":
        pytest.importorskip("compressed_tensors")
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if arguments[0] == "doctor":
        assert result.output.splitlines()[-1].startswith("doctor: "), result.output
    elif arguments[0] == "quantize":
        assert result.exit_code == 0 and (Path(arguments[2]) / "config.json").is_file(), result.output
    else:
        assert result.exit_code == 1 and "FAILED. no GPU is here" in result.stderr, result.output


# Reads command lines (JSON), parses them by vLLM's own parser with our methods registered, and prints those it refuses.
VLLM_PARSER = """
import json, sys
from llm_quant_rocm_vllm import register
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
register()
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(required=True))
refused = []
for arguments in json.load(sys.stdin):
    try:
        known = parser.parse_args(arguments).quantization in (None, *QUANTIZATION_METHODS)
    except SystemExit:
        known = False
    if not known:
        refused.append(arguments)
print(json.dumps(refused))
"""


def test_vllm_takes_its_commands() -> None:
    pytest.importorskip("vllm")
    lines = [program_of(command)[2] for _, command in COMMANDS if program_of(command)[1] == "vllm"]
    wrong = [
        ["serve", "MODEL", "--quantisation", "ptpc_fp8"],
        ["serve", "MODEL", "--quantization", "ptpc_fp9"],
        ["srve", "MODEL"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", VLLM_PARSER],
        input=json.dumps([*lines, *wrong]),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == wrong


# --- Python


PYTHON = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}), ids=lambda page: page.name)
def test_python_runs(page: Path) -> None:
    """A page's blocks one after another, in one namespace; of a block that is not run, its imports."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in (block for block in PYTHON if block.page == page):
        tree = ast.parse(block.text)
        if block.not_run:
            tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(tree, str(block), "exec"), namespace)


# --- messages


def flattened(node: ast.AST) -> str | None:
    """A string literal's text, with `...` for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    return None


def holds(message: str, quoted: str) -> bool:
    """Whether the pieces of `quoted` between its dots stand in `message` in this order."""
    quoted, at = re.sub(r"(LLM_QUANT_ROCM_|torch\.float8_)\.\.\.", "...", quoted), 0
    for piece in filter(None, (piece.strip() for piece in quoted.split("..."))):
        at = message.find(piece, at) + len(piece)
        if at < len(piece):
            return False
    return True


LITERALS = {
    text for file in CODE for node in ast.walk(ast.parse(file.read_text())) if (text := flattened(node)) is not None
}
LITERALS |= {re.sub(r"%[sdgr]", "...", text) for text in LITERALS}  # of log lines


def quoted_messages(page: Path) -> list[str]:
    """The first cells of a page's tables of messages, but for other programs' ("vLLM: `...`")."""
    found = []
    for table in page.read_text().split("| the message says |")[1:]:
        rows = table.split("\n\n")[0].splitlines()[2:]
        for row in rows:
            cell = row.split(" | ")[0].removeprefix("| ")
            if cell.startswith("`"):
                found += re.findall(r"`([^`]+)`", cell)
    return found


WITH_MESSAGES = [page for page in PAGES if "| the message says |" in page.read_text()]


@pytest.mark.parametrize("page", WITH_MESSAGES, ids=lambda page: page.name)
def test_quoted_messages_are_the_codes(page: Path) -> None:
    messages = quoted_messages(page)
    assert messages
    unknown = [message for message in messages if not any(holds(literal, message) for literal in LITERALS)]
    assert unknown == []


# Modules whose errors reach users of the engines and of the commands; those of the operators and formats tell
# programmers what an argument should have been.
FOR_USERS = (
    "llm_quant_rocm/backends.py", "llm_quant_rocm/hardware.py", "llm_quant_rocm/comm/policy.py",
    "llm_quant_rocm/json_files.py", "llm_quant_rocm/checkpoint/", "llm_quant_rocm/cli/", "plugins/",
)  # fmt: skip
# What cannot be met but by a mistake of ours.
INTERNAL = ("the evaluations are of different texts", "sizes ... do not rise from 0", "a step of ... by ...")
# Of parts that are listed.
PUT_TOGETHER = ("... holds ...: ...",)


def raised() -> Iterator[tuple[str, str]]:
    """(place, message) of every error with a literal message that is for users."""
    for file in CODE:
        place = str(file.relative_to(ROOT))
        if not place.startswith(FOR_USERS):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = flattened(node.exc.args[0])
                if message and re.search(r"[a-z]{3}", message):  # else it is put together of others
                    yield f"{place}:{node.lineno}", message


def test_every_message_for_users_is_listed() -> None:
    listed = [*quoted_messages(ROOT / "docs" / "troubleshooting.md"), *INTERNAL]
    messages = list(raised())
    assert len(messages) > 40
    missing = [
        f"{place}: {message}"
        for place, message in messages
        if message not in PUT_TOGETHER and not any(holds(message, row) for row in listed)
    ]
    assert missing == [], "docs/troubleshooting.md lacks them"


# --- environment


def test_every_variable_has_its_row() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    for variable in VARIABLES.values():
        values = ", ".join(f"`{value}`" for value in variable.values)
        row = f"| `{variable.name}` | {values} | {variable.default} | {variable.meaning} |".replace("|  |", "| |")
        assert row in text, f"docs/environment.md lacks\n{row}"


def test_named_variables_are_the_codes() -> None:
    for page in PAGES:
        named = set(re.findall(r"`((?:LLM_QUANT_ROCM|VLLM_ROCM_QUICK_REDUCE)_[A-Z0-9_]*[A-Z0-9])`", page.read_text()))
        assert named <= set(VARIABLES), page.name


# --- links


def anchors(page: Path) -> set[str]:
    """Of its headings, as web hosts of Markdown name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", page.read_text()) if "://" not in link]
    for file, _, anchor in (link.partition("#") for link in links):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


# --- figures


FIGURES = sorted((ROOT / "docs" / "figures").glob("*.py"))


@pytest.mark.parametrize("script", FIGURES, ids=lambda script: script.stem)
def test_a_figure_is_drawn_shown_and_small(script: Path, tmp_path: Path) -> None:
    picture = script.with_suffix(".png")
    assert picture.stat().st_size < 300_000
    assert any(f"(figures/{picture.name})" in page.read_text() for page in PAGES), f"no page shows {picture.name}"
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    assert (tmp_path / picture.name).stat().st_size > 10_000


def test_every_picture_has_its_script() -> None:
    pictures = {file.stem for file in (ROOT / "docs").rglob("*.png")}
    assert pictures == {script.stem for script in FIGURES}
