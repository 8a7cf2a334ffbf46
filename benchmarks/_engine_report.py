# SPDX-License-Identifier: Apache-2.0
"""The report's sections on whole engines: time and accuracy in vLLM and SGLang, and the demo model on a CPU."""

from typing import Any

from benchmarks import _lines as lines
from benchmarks._markdown import gpus, measured_on, table

DEMO = "The demo model over its held-out text, in windows of 200 tokens:"
_HOW = "CUDA graphs, 1024 tokens in and 129 out:"
# What is timed, by its name in the figures.
SHAPES = {
    "llama_3_70b_8_layers": f"The shape of Llama-3-70B cut to eight layers, dummy weights, {_HOW}",
    "qwen3_30b_a3b_12_layers": f"The shape of Qwen3-30B-A3B cut to twelve layers, random weights, {_HOW}",
}


def vllm(name: str, result: dict[str, Any]) -> str:
    return _engine(name, f"A whole vLLM {result['vllm']}", result)


def sglang(name: str, result: dict[str, Any]) -> str:
    ranks = result.get("ranks", 1)
    title = f"A whole SGLang {result.get('sglang', '')}".strip()
    return _engine(name, f"{title}, {gpus(ranks)}" if ranks > 1 else title, result)


def _engine(name: str, title: str, result: dict[str, Any]) -> str:
    text = f"## {title}\n\n{measured_on(result)}"
    measured = {
        group: {method: found for method, found in result.get(group, {}).items() if "failed" not in found}
        for group in (*SHAPES, "demo_model")
    }
    demo = measured.pop("demo_model")
    panels = {
        f"{group}\n{count}: total, s": {method: found[count]["total_s"] for method, found in times.items()}
        for group, times in measured.items()
        for count in dict.fromkeys(count for found in times.values() for count in found if "prompt" in count)
    }
    if demo:
        panels["demo model: change of perplexity, %"] = _changes(demo)
        text += f"\n\n{DEMO}\n\n{accuracy_table(demo)}"
    if panels:
        lines.bars(name, f"{title}\n{measured_on(result)}", panels)
        text += f"\n\n![time and accuracy]({name}.png)"
    for group, times in measured.items():
        if times:
            text += f"\n\n{SHAPES[group]}\n\n{engine_table(times, result['environment']['commit'])}"
    return text


def _changes(demo: dict[str, Any]) -> dict[str, float]:
    """By method, the change of perplexity from the first one's in %."""
    base = next(iter(demo.values()))["perplexity"]
    return {method: 100 * (found["perplexity"] / base - 1) for method, found in demo.items()}


def accuracy_table(demo: dict[str, Any]) -> str:
    base = next(iter(demo.values()))["perplexity"]
    rows = [
        [method, f"{found['perplexity']:.3f}", f"{100 * (found['perplexity'] / base - 1):+.2f}%"]
        + [f"{100 * found['agreement']:.1f}%"]
        for method, found in demo.items()
    ]
    return table(["quantization", "token perplexity", "change", "most likely token as in bf16"], rows)


def engine_table(times: dict[str, Any], commit: str) -> str:
    """`commit` is the file's; a method that was measured at another one names it."""
    rows = [
        [method, prompts, *(str(found[prompts][key]) for key in ("prefill_s", "ms_a_step", "total_s"))]
        + [found.get("commit", commit)]
        for method, found in times.items()
        for prompts in (key for key in found if "prompt" in key)
    ]
    return table(["quantization", "batch", "prefill, s", "ms a step", "total, s", "commit"], rows)


def loading(name: str, result: dict[str, Any]) -> str:
    """What the weights take while they load, and after."""
    title = f"Loading in vLLM {result['vllm']}"
    shown = {"peak on the GPU, GiB": "peak_reserved_gib", "seconds of a first start": "seconds"}
    panels = {
        f"{shape}: {what}": {method: rounds["first"][key] for method, rounds in methods.items()}
        for shape, methods in _loaded(result).items()
        for what, key in shown.items()
    }
    lines.bars(name, f"{title}\n{measured_on(result)}", panels)
    return f"## {title}\n\n{measured_on(result)}\n\n![memory and seconds]({name}.png)\n\n{loading_table(result)}"


def loading_table(result: dict[str, Any]) -> str:
    """Without the seconds of a second start where there was none."""
    rows = []
    for shape, methods in _loaded(result).items():
        for method, rounds in methods.items():
            first, again = rounds["first"], rounds.get("again", {}).get("seconds")
            rows.append(
                [shape, f"`{method}`", f"{first['seconds']:.1f}", f"{again:.1f}" if again else ""]
                + [f"{first[f'{key}_gib']:.2f}" for key in ("peak_allocated", "peak_reserved", "final_allocated")]
            )
    memory = ["peak of tensors, GiB", "peak reserved, GiB", "in the end, GiB"]
    return table(["shape", "method", "first start, s", "a later one, s", *memory], rows)


def _loaded(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By shape and method, the rounds of what could be loaded."""
    return {
        shape: {method: rounds for method, rounds in methods.items() if "seconds" in rounds.get("first", {})}
        for shape, methods in result["shapes"].items()
    }


def quick_reduce(name: str, result: dict[str, Any]) -> str:
    codecs = {codec: found for codec, found in result["codecs"].items() if "perplexity" in found}
    lines.bars(
        name, f"The quantized all-reduce in vLLM {result['vllm']}, {result['ranks']} ranks\n{measured_on(result)}",
        {"change of perplexity, %": _changes(codecs)},
    )  # fmt: skip
    return (
        f"## The quantized all-reduce in vLLM {result['vllm']}, {result['ranks']} ranks\n\n{measured_on(result)}\n\n"
        f"![perplexity by codec]({name}.png)\n\n{DEMO}\n\n{accuracy_table(codecs)}"
    )


def words(name: str, result: dict[str, Any]) -> str:
    """Perplexity of words, as `llm-quant-rocm demo` and `eval` say it."""
    methods = result["methods"]
    lines.bars(
        name, f"The demo model\n{measured_on(result)}",
        {"loss of word perplexity, %": {method: found["loss_percent"] for method, found in methods.items()}},
    )  # fmt: skip
    rows = [
        [method, f"{found['word_perplexity']:.2f}", f"{found['loss_percent']:+.2f}%"]
        + [f"{found['greedy_agreement_percent']:.1f}%"]
        for method, found in methods.items()
    ]
    title = "Ways to quantize to NVFP4" if name.startswith("quantize") else "Accuracy of the demo model"
    return (
        f"## {title}, on a CPU\n\n{measured_on(result)}\n\n`{result['environment'].get('command', '')}`\n\n"
        f"![loss]({name}.png)\n\n"
        f"{table(['quantization', 'word perplexity', 'loss', 'most likely token as in bf16'], rows)}"
    )
