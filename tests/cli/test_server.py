# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server of ours, and answers that are none."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from llm_quant_rocm.cli import _server
from llm_quant_rocm.cli._errors import CommandError


class Answers(BaseHTTPRequestHandler):
    """Answers a prompt with itself, and says that so many bytes more follow."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, _, missing = asked["prompt"].partition("|")
        self.send_response(200)
        self.send_header("Content-Length", str(len(text) + len(missing)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_completion(url: str) -> None:
    assert _server.complete(url, '{"choices": [{"text": "and so on"}]}', 3) == "and so on"


@pytest.mark.parametrize("answer", ["{", "[]", "{}", '{"choices": []}', '{"choices": null}', "{}|cut off"])
def test_an_answer_without_a_text(url: str, answer: str) -> None:
    with pytest.raises(CommandError, match=r"^the server did not answer POST /v1/completions with a text: \w+\("):
        _server.complete(url, answer, 3)


def test_no_server() -> None:
    with pytest.raises(CommandError, match="did not answer .*Connection refused"):
        _server.complete("http://127.0.0.1:9", "x", 3)
