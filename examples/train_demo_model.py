# SPDX-License-Identifier: Apache-2.0
"""Train the demo model: a small Llama that has read Python's own documentation, with the outliers of a large one.

    python examples/train_demo_model.py                  about 9 minutes on two threads

Needs torch, transformers and rich. Writes an ordinary Hugging Face checkpoint in BF16, the held-out text,
``metrics.json`` and a README. The same Python, library versions and seed give the same checkpoint.
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from demo_training import corpus as text
from demo_training.model import CONTEXT, demo_config, encode_documents, train, train_tokenizer
from demo_training.outliers import add_outliers
from demo_training.simulation import mean_loss, quantized
from demo_training.unigram import unigram_loss
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# Chosen by a search over the simulation: per-tensor FP8 loses visibly, per-token and per-channel scales do not.
OUTLIERS = {"channels": 2, "channel_factor": 2.0**10, "query_factor": 2.0**7}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "demo_model")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4, help=f"sequences of {CONTEXT} tokens in a step")
    parser.add_argument("--hidden", type=int, default=192, help="width, a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trained", type=Path, help="keep the FP32 model in this folder; if it is there, do not train")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)

    start = time.monotonic()
    documents = text.gather()
    tokenizer = train_tokenizer([document.text for document in documents.train], arguments.vocabulary)
    tokens = encode_documents(tokenizer, [document.text for document in documents.train])
    if arguments.trained is not None and (arguments.trained / "config.json").is_file():
        model = LlamaForCausalLM.from_pretrained(arguments.trained, dtype=torch.float32).eval()
    else:
        model = train(
            demo_config(len(tokenizer), arguments.hidden),
            tokens,
            steps=arguments.steps,
            batch=arguments.batch,
            seed=arguments.seed,
        )
        if arguments.trained is not None:
            model.save_pretrained(arguments.trained)
    finish(model, tokenizer, documents, tokens, arguments.output, vars(arguments) | {"outliers": OUTLIERS}, start)


def finish(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: text.Corpus,
    tokens: torch.Tensor,
    output: Path,
    settings: dict[str, Any],
    start: float,
) -> None:
    """Round a trained model to BF16, add the outliers, measure, and write the checkpoint's folder.

    Args:
        tokens: int64 [tokens], the training documents.
        start: ``time.monotonic()`` when the work began.
    """
    # BF16 first: the powers of two of the outliers then change no mantissa.
    model = model.to(torch.bfloat16).float()
    heldout = torch.tensor(tokenizer.encode(documents.heldout_text, add_special_tokens=False))
    heldout_windows = windows(heldout, tokenizer.bos_token_id)
    sample = windows(tokens[: 16 * CONTEXT], tokenizer.bos_token_id)

    before = mean_loss(model, heldout_windows)
    add_outliers(model, sample, **OUTLIERS)
    losses = {"bf16": mean_loss(model, heldout_windows)}
    for scheme in ("per_tensor", "ptpc"):
        with quantized(model, scheme):
            losses[scheme] = mean_loss(model, heldout_windows)
    losses["unigram"] = unigram_loss(tokens, heldout, len(tokenizer))
    tokens_per_word = heldout.numel() / len(documents.heldout_text.split())
    metrics = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_documents": len(documents.train),
        "train_tokens": tokens.numel(),
        "heldout_documents": [document.name for document in documents.heldout],
        "heldout_tokens": heldout.numel(),
        "heldout_words": len(documents.heldout_text.split()),
        "token_perplexity": {name: math.exp(loss) for name, loss in losses.items()},
        "word_perplexity": {name: math.exp(loss * tokens_per_word) for name, loss in losses.items()},
        "word_perplexity_loss_percent_simulated": {
            name: 100 * math.expm1((losses[name] - losses["bf16"]) * tokens_per_word) for name in ("per_tensor", "ptpc")
        },
        "loss_change_by_outliers": losses["bf16"] - before,
        "settings": {name: value for name, value in settings.items() if name not in ("output", "trained")},  # folders
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }

    output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(output)
    save_tokenizer(tokenizer, output)
    (output / "heldout.txt").write_text(documents.heldout_text, encoding="utf-8")
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    (output / "README.md").write_text(readme(metrics), encoding="utf-8")
    perplexity = metrics["word_perplexity"]
    print(
        f"{output}: word perplexity {perplexity['bf16']:.1f} (unigram {perplexity['unigram']:.0f}), "
        f"{time.monotonic() - start:.0f} s"
    )


def windows(tokens: torch.Tensor, begin: int) -> torch.Tensor:
    """The whole windows of tokens [tokens], each behind the token ``begin``: int64 [windows, CONTEXT - 1].

    One token shorter than the context, as vLLM scores them.
    """
    length = CONTEXT - 2
    rows = tokens[: tokens.numel() // length * length].view(-1, length)
    return torch.cat([torch.full((rows.shape[0], 1), begin), rows], dim=1)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Save the tokenizer under the class name that transformers 4 and 5 both know."""
    tokenizer.save_pretrained(output)
    path = output / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def readme(metrics: dict[str, Any]) -> str:
    """The README of the checkpoint's folder."""
    token, word = metrics["token_perplexity"], metrics["word_perplexity"]
    loss, outliers = metrics["word_perplexity_loss_percent_simulated"], metrics["settings"]["outliers"]
    rows = [
        ("unigram model (token frequencies alone)", "unigram", ""),
        ("this checkpoint", "bf16", ""),
        ("this checkpoint, per-tensor FP8, simulated", "per_tensor", f"{loss['per_tensor']:+.2f}%"),
        ("this checkpoint, PTPC FP8, simulated", "ptpc", f"{loss['ptpc']:+.2f}%"),
    ]
    table = "\n".join(f"| {label} | {token[key]:.2f} | {word[key]:.1f} | {change} |" for label, key, change in rows)
    return f"""# Demo model

Written by `examples/train_demo_model.py`; do not edit. A Llama of {metrics["parameters"]:,} parameters in BF16 with a
byte-level BPE tokenizer, small enough to be served and measured on a CPU in a minute. It is no use as a language model.

## Text
Python's own documentation as every installation of Python carries it: the topics of `help()` (`pydoc_data.topics`,
which is the language reference) and the docstrings of the standard library, of Python {metrics["versions"]["python"]}.
Copyright of the Python Software Foundation and others, under the PSF License Agreement Version 2
(https://docs.python.org/3/license.html). `heldout.txt` is a part of that text under the same licence:
{len(metrics["heldout_documents"])} whole documents, {metrics["heldout_words"]:,} words, that the model was not
trained on. No paragraph of 40 characters or more is in both parts. `metrics.json` names them.

## Perplexity over heldout.txt

| | per token | per word | loss |
|---|---|---|---|
{table}

Windows of {CONTEXT - 2} tokens behind the end-of-text token, computed in FP32 with transformers (simulated: operands of
the decoder's linears rounded to E4M3). `llm-quant-rocm demo` measures the same in vLLM.

## Outliers
Large models have activations in a few channels far above the rest, and weight rows of very different size. A model
trained for minutes has neither, so both were put in after training by rescalings that do not change its function:
in each layer {outliers["channels"]} channels of both norms times {outliers["channel_factor"]:g} with the input columns
of the next linears divided by it, and queries times {outliers["query_factor"]:g} with keys divided by it.
All factors are powers of two, exact in BF16. The channels are those that
are large for few tokens, so that one scale for a batch serves most of its tokens badly.
The loss changed by {metrics["loss_change_by_outliers"]:.1e} nats.
"""


if __name__ == "__main__":
    main()
