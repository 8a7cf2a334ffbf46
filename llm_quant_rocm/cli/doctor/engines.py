# SPDX-License-Identifier: Apache-2.0
"""The engines: whether they will find the plugin, and, if asked, whether it loads into them."""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from llm_quant_rocm.cli.doctor import load_plugin
from llm_quant_rocm.cli.doctor.load_plugin import OURS
from llm_quant_rocm.cli.doctor.table import Part, Problem
from llm_quant_rocm.environment import read
from llm_quant_rocm.versions import installed

_SECONDS = 300  # importing an engine for the first time may compile


@dataclass(frozen=True)
class Host:
    """An engine.

    Attributes:
        engine: its name.
        group: of entry points in which it looks for plugins.
        chooser: its variable that chooses among them.
        is_literal: whether blanks count as part of a name in that variable, and an empty text as a list of none.
    """

    engine: str
    group: str
    chooser: str
    is_literal: bool


VLLM = Host("vllm", "vllm.general_plugins", "VLLM_PLUGINS", is_literal=True)
HOSTS = (VLLM, Host("sglang", "sglang.srt.plugins", "SGLANG_PLUGINS", is_literal=False))


@dataclass(frozen=True)
class Engine:
    """An engine and our plugin in it.

    Attributes:
        plugin: what the engine would call, as its entry point names it; None where there is none.
        loads: whether it did load, every patch with it; None where nobody asked.
    """

    engine: str
    version: str
    plugin: str | None
    loads: bool | None


def examine(load: bool) -> Part:
    """The engines that are installed. With `load` each is imported, in a process of its own, with the plugin."""
    rows: list[Engine] = []
    problems: list[Problem] = []
    for host in HOSTS:
        version = installed(host.engine)
        if version is None:
            continue
        found = _entry_point(host)
        problem = refusal(host)
        failures = _failures(host) if load and problem is None else []
        problems += [problem] if problem else failures
        loads = not failures if load and problem is None else None
        rows.append(Engine(host.engine, version, found.value if found else None, loads))
    notes = [] if load else ["no engine was imported: --engines loads the plugin into each, some ten seconds"]
    return Part("engines", "Engines", rows, notes if rows else ["no engine is installed here"], problems)


def _entry_point(host: Host) -> EntryPoint | None:
    return next(iter(entry_points(group=host.group, name=OURS)), None)


def refusal(host: Host) -> Problem | None:
    """Why the engine, which is installed, would not load the plugin, or None. Imports neither."""
    found = _entry_point(host)
    install = f"install llm-quant-rocm in the environment of {host.engine}"
    if found is None:
        return Problem(f"{host.engine} cannot find the plugin: {host.group} has no entry point {OURS}", install)
    if find_spec(found.module) is None:
        return Problem(f"{host.engine} cannot import {found.module}, which the entry point {OURS} names", install)
    wanted = read(host.chooser)
    if wanted is None or not (wanted or host.is_literal):
        return None
    named = wanted.split(",")
    trimmed = [name.strip() for name in named]
    if OURS in (named if host.is_literal else trimmed):
        return None
    add = f"write {','.join(trimmed)}, without blanks" if OURS in trimmed else f"add {OURS} to it"
    return Problem(f"{host.chooser}={wanted} leaves {OURS} out", f"unset {host.chooser}, or {add}")


def _failures(host: Host) -> list[Problem]:
    """What went wrong, or was warned of, when the engine's Python loaded the plugin and called it."""
    command = [sys.executable, "-c", f"from {load_plugin.__name__} import main; main({host.group!r})"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [Problem(f"{host.engine} did not load the plugin in {_SECONDS} s", f"import {host.engine} alone")]
    if done.returncode == 0:
        return [Problem.of(message) for message in json.loads(done.stdout.splitlines()[-1])]
    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return [
        Problem(
            f"the plugin does not load into {host.engine}: {last[0]}",
            f"see whether `import {host.engine}` works by itself; docs/troubleshooting.md has what is known",
        )
    ]
