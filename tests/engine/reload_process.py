# SPDX-License-Identifier: Apache-2.0
"""What becomes of a model whose weights vLLM reloads: `python reload_process.py REQUEST.json ANSWER.json`.

The request holds `settings` (arguments of vllm.LLM), `loaded` (a checkpoint, which the model itself is to load) and
`reloads` (checkpoints, which vLLM loads in turn). The answer holds what the model says to the first, and for each the
names of the tensors that are then not as they were in the beginning, or the error's text.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm import LLM


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().reshape(-1).view(torch.uint8) for name, tensor in model.state_dict().items()}


class Load:
    """Has a worker's model load a checkpoint. A class, not a closure: workers may be other processes."""

    def __init__(self, checkpoint: str) -> None:
        self.file = Path(checkpoint, "model.safetensors")

    def __call__(self, model: torch.nn.Module) -> str:
        try:
            model.load_weights(load_file(self.file).items())
        except Exception as error:
            return str(error)
        return ""


def changes(llm: LLM, before: dict[str, torch.Tensor]) -> list[str]:
    [after] = llm.apply_model(state)
    assert after.keys() == before.keys()
    return [name for name in before if not torch.equal(after[name], before[name])]


def reload(llm: LLM, checkpoint: str, before: dict[str, torch.Tensor]) -> list[str] | str:
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    except Exception as error:
        return str(error)
    return changes(llm, before)


def main(request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    llm = LLM(**request["settings"])
    [before] = llm.apply_model(state)
    answers = [*llm.apply_model(Load(request["loaded"])), changes(llm, before)]
    answers += [reload(llm, checkpoint, before) for checkpoint in request["reloads"]]
    Path(answer_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
