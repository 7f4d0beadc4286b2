"""Tokenizer, model and pre-training of the miniature Qwen3 and Qwen3-VL checkpoints."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoint_files import arguments_given, size_kb
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

__all__ = ["END", "SPECIAL", "build_model", "build_tokenizer", "complete", "corpus_rows", "pretrain", "write_card"]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = "<|im_end|>"


def build_tokenizer(
    words: Sequence[str],
    *,
    added: Sequence[str] = (),
    special: Sequence[str] = SPECIAL,
    chat_template: str | None = None,
) -> Any:
    """Byte-level BPE, as Qwen's: every text has tokens, and each of `words` is one token.

    words: pieces of text with the spaces before them. Those that start with a letter come last: their merges would
    otherwise also join letters inside other words.
    added: further tokens that are never split.  special: those that decoding may skip.
    """
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in words:
        whole, *letters = symbols.pre_tokenize_str(word)[0][0]
        for letter in letters:
            if (whole, letter) not in merges:
                merges.append((whole, letter))
            whole += letter
            vocab.setdefault(whole, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = symbols
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", model_max_length=512
    )
    fast.chat_template = chat_template
    return fast


def build_model(tokenizer: Any, *, hidden_size: int = 64) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
            bos_token_id=None,
        )
    )
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def corpus_rows(tokenizer: Any, prompts: Sequence[list[int]], completions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens [n, L], padded on the right, and the labels of the completions and their ends [n, L], -100 elsewhere."""
    ends = tokenizer([completion + END for completion in completions])["input_ids"]
    longest = max(len(prompt) + len(end) for prompt, end in zip(prompts, ends, strict=True))
    tokens = torch.full((len(prompts), longest), tokenizer.pad_token_id)
    labels = torch.full_like(tokens, -100)
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        length = len(prompt) + len(end)
        tokens[row, :length] = torch.tensor(prompt + end)
        labels[row, len(prompt) : length] = torch.tensor(end)
    return tokens, labels


def pretrain(
    model: PreTrainedModel,
    draw: Callable[[], Iterable[tuple[Mapping[str, Tensor], Tensor]]],
    *,
    steps: int,
    learning_rate: float,
) -> None:
    """AdamW on the mean next-token loss of the labels.

    draw: the batch of a step, in parts (the model's arguments, labels [n, L]) that may differ in length.
    """
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    started = time.monotonic()
    for step in range(steps):
        rate = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        loss, total = torch.zeros(()), 0
        for arguments, labels in draw():
            logits, expected = model(**arguments).logits[:, :-1], labels[:, 1:]
            total += int((expected != -100).sum())
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten(), reduction="sum")
        optimizer.zero_grad()
        (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"{step} loss {float(loss.detach()) / total:.4f} {time.monotonic() - started:.0f}s", flush=True)
    model.eval()


@torch.no_grad()
def complete(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    greedy: bool,
    seed: int,
    media: Mapping[str, Tensor] | None = None,
) -> list[str]:
    """One completion of each prompt, greedy or at temperature 1, without special tokens.

    media: further arguments of the model, such as pixels.
    """
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            **(media or {}),
            **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}),
        )
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def write_card(
    folder: Path,
    card: str,
    measure: Callable[..., Mapping[str, float]],
    tokenizer: Any,
    splits: Mapping[str, Sequence[Any]],
    *,
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    **facts: Any,
) -> None:
    """Write the card of a checkpoint: `card` with its size, how it was made, `facts`, and shares of both splits.

    measure: shares of a model on examples, called as `measure(model, tokenizer, examples, greedy=..., seed=...)`.
    """
    model = Qwen3ForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, trust_remote_code=False
    ).eval()
    rows: list[str] = []
    for split in ("heldout", "train"):
        for greedy in (True, False):
            shares = measure(model, tokenizer, splits[split][: args.measured], greedy=greedy, seed=args.seed + 1000)
            how = "greedy" if greedy else "temperature 1"
            rows.append(f"| {split} | {how} | {' | '.join(f'{share:.3f}' for share in shares.values())} |")
    text = card.format(
        kilobytes=size_kb(folder),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        arguments=arguments_given(args, parser),
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        corpus=len(splits["corpus"]),
        shares="\n".join(rows),
        **facts,
    )
    (folder / "README.md").write_text(text)
    print(text)
