# SPDX-License-Identifier: Apache-2.0
"""Work of an engine in a process of its own: engines do not share a process, nor leave memory behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_quant_rocm.cli import _vllm
from llm_quant_rocm.cli._errors import CommandError, end_of


def run(
    module: str,
    job: Mapping[str, Any],
    what: str,
    environment: Mapping[str, str],
    timeout: float,
    raised_by: str | None = None,
) -> Any:
    """What `python -m module JOB` writes to the JSON file that JOB names as "result".

    Args:
        what: for messages, what it does.
        environment: variables of the process, over those of this one.
        timeout: seconds it may take.
        raised_by: the option of the command that gives it more of them.

    Raises:
        CommandError: it failed; holds the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        command = [sys.executable, "-m", module, json.dumps({**job, "result": str(result)})]
        variables = {**_vllm.environment(), **environment}
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an engine has children: its group ends as one
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        if code != 0:
            cure = f" (raise {raised_by})" if raised_by else ""
            how = f"ended with exit code {code}" if code is not None else f"was not done after {timeout:.0f} s{cure}"
            raise CommandError(f"{what} {how}:\n{end_of(log.read_text(errors='replace'))}")
        return json.loads(result.read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
