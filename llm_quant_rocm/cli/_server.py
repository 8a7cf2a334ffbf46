# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of our own: started, waited for, asked, stopped."""

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llm_quant_rocm.cli import _vllm
from llm_quant_rocm.cli._errors import CommandError, end_of

_POLL_SECONDS = 0.5


@contextmanager
def serving(
    model: Path,
    context: int,
    quantization: str | None,
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    timeout: float = 300.0,
    on_wait: Callable[[float], None] = lambda _: None,
) -> Iterator[str]:
    """Serve ``model`` within the context.

    Args:
        context: the longest sequence, in tokens.
        quantization: vLLM's name of the method; None is no flag.
        options: more arguments of ``vllm serve``.
        environment: variables of the server, over those of this process.
        timeout: seconds that the server may take to come up.
        on_wait: called again and again with the seconds waited so far.

    Yields:
        the server's base URL.

    Raises:
        CommandError: the server ended or did not come up; holds the end of its log.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            _vllm.serve_command(model, port, context, quantization, options),
            env={**_vllm.environment(), "VLLM_LOGGING_LEVEL": "INFO", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the server has children: its group ends as one
        )
        try:
            _wait(process, port, timeout, on_wait, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(process)


def complete(url: str, prompt: str, tokens: int) -> str:
    """Greedy completion of ``prompt`` by ``tokens`` tokens, by POST /v1/completions.

    Raises:
        CommandError: there was no answer, or one without a text.
    """
    body = json.dumps({"model": _vllm.SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["choices"][0]["text"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise CommandError(f"the server did not answer POST /v1/completions with a text: {error!r}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(
    process: subprocess.Popen[bytes], port: int, timeout: float, on_wait: Callable[[float], None], log: IO[bytes]
) -> None:
    start = time.monotonic()
    while (waited := time.monotonic() - start) < timeout:
        on_wait(waited)
        if process.poll() is not None:
            raise CommandError(f"vllm serve ended with exit code {process.returncode}:\n{_end_of(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            time.sleep(_POLL_SECONDS)
    raise CommandError(f"vllm serve was not up after {timeout:.0f} s:\n{_end_of(log)}")


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return end_of(log.read().decode(errors="replace"))


def _stop(process: subprocess.Popen[bytes]) -> None:
    for signal_number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal_number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # a child that outlived the server
    except ProcessLookupError:
        return
