# SPDX-License-Identifier: Apache-2.0
"""What becomes of a model whose weights vLLM reloads: `python reload_process.py REQUEST.json ANSWER.json`.

The request holds `settings` (arguments of vllm.LLM) and `reloads` (checkpoints, which are loaded in turn). The answer
holds for each the names of the tensors that are then not as they were in the beginning, or the error's text.
"""

import json
import sys
from pathlib import Path

import torch
from vllm import LLM


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().reshape(-1).view(torch.uint8) for name, tensor in model.state_dict().items()}


def reload(llm: LLM, checkpoint: str, before: dict[str, torch.Tensor]) -> list[str] | str:
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    except Exception as error:
        return str(error)
    [after] = llm.apply_model(state)
    assert after.keys() == before.keys()
    return [name for name in before if not torch.equal(after[name], before[name])]


def main(request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    llm = LLM(**request["settings"])
    [before] = llm.apply_model(state)
    Path(answer_file).write_text(json.dumps([reload(llm, checkpoint, before) for checkpoint in request["reloads"]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
