# SPDX-License-Identifier: Apache-2.0
"""The demo model: its tokenizer, its shape, its training."""

import math

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
CONTEXT = 512  # tokens, in training and when served


def train_tokenizer(texts: list[str], vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``vocabulary`` entries. One special token both begins and ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def demo_config(vocabulary: int, hidden: int = 192, layers: int = 3, end_of_text: int = 0) -> LlamaConfig:
    """A Llama whose linear dimensions are multiples of 16 and that tensor parallelism of 2 can split."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
    )


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts as one int64 tensor [tokens], each behind an end-of-text token."""
    ids: list[int] = []
    for text in texts:
        ids.append(tokenizer.bos_token_id)
        ids.extend(tokenizer.encode(text, add_special_tokens=False))
    return torch.tensor(ids, dtype=torch.int64)


def train(
    config: LlamaConfig, tokens: torch.Tensor, *, steps: int, batch: int, seed: int, peak_lr: float = 4e-3
) -> LlamaForCausalLM:
    """Train from scratch in FP32 with AdamW, a short warm-up and a cosine schedule.

    Every sequence is a random crop of ``tokens`` behind an end-of-text token, as the windows of the evaluation are.

    Args:
        tokens: int64 [tokens], longer than the context.
        steps: optimizer steps of ``batch`` sequences of ``CONTEXT`` tokens.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).train()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_lr,
        betas=(0.9, 0.95),
    )
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    length = CONTEXT - 1
    begin = torch.full((batch, 1), config.bos_token_id)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    average = math.log(config.vocab_size)
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=steps, loss=average)
        for _ in range(steps):
            starts = torch.randint(0, tokens.numel() - length, (batch,), generator=generator)
            ids = torch.cat([begin, torch.stack([tokens[s : s + length] for s in starts.tolist()])], dim=1)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            average += 0.05 * (loss.item() - average)
            progress.update(bar, advance=1, loss=average)
    return model.eval()
