# SPDX-License-Identifier: Apache-2.0
"""Weights that are to be loaded into a server that is up: refused, and the server goes on."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import servers
import sglang
from conftest import DEMO

REFUSAL = " was prepared for its kernels when the checkpoint was loaded, and no other can be loaded over it"


def post(address: str, path: str, **data: object) -> Any:
    url, body = f"{address.removesuffix('/v1')}/{path}", json.dumps(data).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


@pytest.mark.skipif(sglang.__version__.startswith("0.5.17"), reason="it asks nobody before it loads")
def test_a_server_refuses_new_weights_and_goes_on(folder: Path) -> None:
    prompt = {"text": servers.PROMPTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    with servers.serve(folder / "updated.txt", DEMO, "--quantization=ptpc_fp8") as address:
        before = post(address, "generate", **prompt)["text"]
        answer = post(address, "update_weights_from_disk", model_path=str(DEMO))
        assert not answer["success"]
        assert REFUSAL in answer["message"]
        assert post(address, "generate", **prompt)["text"] == before
