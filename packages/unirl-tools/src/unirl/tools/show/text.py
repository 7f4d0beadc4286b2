"""Facts of samples as text for a terminal of 100 columns."""

from __future__ import annotations

import json
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from unirl.core.names import shortened

from .facts import Facts

__all__ = ["list_text", "sample_text"]

WIDTH = 100
LABEL = 13
"""Columns of the names before values."""
LETTERS = {"token": "id", "log_prob": "log-prob", "engine_log_prob": "engine", "reference_log_prob": "reference"}
"""Headings that differ from the name of a value."""


def sample_text(facts: Facts, *, tokens: int) -> str:
    """A sample with its ancestors.  tokens: most rows of a text's table of tokens, half from each end; 0 is all."""
    step, prompt = facts["step"], facts["prompt"]
    lines = [
        printable(facts["sample"]),
        f"{printable(facts['run'])}, rollout {step}, for training step {step + 1}",
        "",
        "prompt",
        *_block(prompt["text"]),
        *_media(prompt["media"]),
        *(_line("metadata", json.dumps(prompt["metadata"], ensure_ascii=False)) if prompt["metadata"] else []),
    ]
    for stage in facts["lineage"]:
        lines += ["", *_stage(stage, tokens=tokens, is_single=len(facts["lineage"]) == 1)]
    if facts["children"]:
        made = (f"{child['sample']} (reward {_number(child['reward'])})" for child in facts["children"])
        lines += ["", "made from it", *(line for each in made for line in _wrapped(each, indent=2))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def list_text(facts: Facts, *, sort: str, limit: int) -> str:
    """The samples of a stage, the lowest first, then the highest, with how to look at one of them."""
    reward = facts["reward"]
    head = f"{printable(facts['stage'])}, step {facts['step']}: {facts['num_samples']} samples"
    if reward["num_scored"]:
        head += (
            f", reward {_number(reward['mean'])} ± {_number(reward['std'])}, "
            f"{_number(reward['least'])} to {_number(reward['most'])}"
        )
    every, half = facts["samples"], (limit + 1) // 2
    is_cut = len(every) > limit
    shown = [*every[:half], *every[len(every) - limit // 2 :]] if is_cut else every
    columns = [name for name in dict.fromkeys((sort, "reward", "advantage")) if name != "length"]
    columns += ["tokens"] if any(sample["num_tokens"] is not None for sample in shown) else []
    rows = [
        [
            *(
                str(sample["num_tokens"])
                if name == "tokens"
                else "left out"
                if name == "advantage" and sample["is_left_out"]
                else _number(sample["sorted"] if name == sort else sample[name])
                for name in columns
            ),
            printable(sample["sample"]),
            _note(sample) + _snippet(sample["input"] if sample["text"] is None else sample["text"]),
        ]
        for sample in shown
    ]
    table = _table([*columns, "sample", ""], rows, left=2)
    if is_cut:
        gap = f"  ... {len(every) - len(shown)} more; --limit shows them ..."
        table = [*table[: 1 + half], gap, *table[1 + half :]]
    return "\n".join(line.rstrip()[:WIDTH] for line in [head, *table]) + "\n"


def printable(text: str) -> str:
    """A text on one line, with what would move the cursor or turn the direction of writing written out."""
    return "".join(character if _is_shown(character) else repr(character)[1:-1] for character in text)


def _is_shown(character: str) -> bool:
    # Joiners of scripts and emoji are Cf like the marks of direction.
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or character in "\u200c\u200d"


def _stage(facts: Facts, *, tokens: int, is_single: bool) -> Iterator[str]:
    parts = [f"{facts['model']} on {facts['engine']}"] if facts["model"] else []
    parts += [f"trained with {facts['algorithm']}" if facts["algorithm"] else "not trained"]
    yield f"{printable(facts['stage'])}: {printable(', '.join(parts))}"
    if not is_single:
        yield from _line("sample", facts["sample"])
    group, spread = facts["group"], facts["group_rewards"]
    yield from _line("group", f"{group}, {spread['size']} samples")
    if facts["unit"] is not None and facts["unit"] != facts["sample"]:
        yield from _line("unit", facts["unit"])
    status = f"{facts['status']}, weight {_number(facts['weight'])}, policy version {facts['policy_version']}"
    yield from _line("status", status)
    yield from _inputs(facts)
    if "tokens" in facts:
        yield from _text(facts, tokens=tokens)
    if "latents" in facts:
        yield from _latents(facts)
    yield from _scores(facts)


def _inputs(facts: Facts) -> Iterator[str]:
    """What a child is made from; the prompt of a root is above."""
    if facts["parent"] is None:
        return
    inputs = facts["inputs"]
    if inputs["turns"] is not None:
        for turn in inputs["turns"]:
            content = f"{turn['num_tokens']} tokens" if turn["num_tokens"] else "its text" if turn["text"] else ""
            media = ", ".join(ref["uri"] for ref in turn["media"])
            yield from _line("continues", f"{turn['stage']}: {content or media}")
            if turn["text"] and not turn["num_tokens"]:
                yield from _block(turn["text"])
    else:
        yield "  input"
        yield from _block(inputs["text"])
    yield from _media(inputs["media"])


def _text(facts: Facts, *, tokens: int) -> Iterator[str]:
    every = facts["tokens"]
    sampled = f"seed {facts['seed']}, temperature {_number(facts['temperature'])}"
    yield from _line("sampled", f"{len(every)} tokens after a prompt of {facts['num_prompt_tokens']}; {sampled}")
    for turn in facts["turns"] or ():
        yield f"  {printable(turn['by'])}"
        yield from _block(turn["text"])
    if facts["text"] is not None and facts["turns"] is None:
        yield "  text"
        yield from _block(facts["text"])
    log_probs = [token["log_prob"] for token in every if "log_prob" in token and token["is_trained"]]
    if log_probs:
        which = "recomputed" if "engine_log_prob" in every[0] else "the engine's"
        mean = sum(log_probs) / len(log_probs)
        yield from _line("log-prob", f"{sum(log_probs):.4f} in all, {mean:.4f} a token, {which}")
    if facts["no_token_texts"] and every:
        yield from _line("token texts", f"none: {facts['no_token_texts']}")
    if every:
        half = (tokens + 1) // 2
        cut = bool(tokens) and len(every) > tokens
        numbered = [(place, token) for place, token in enumerate(every)]
        shown = [*numbered[:half], *numbered[len(every) - tokens // 2 :]] if cut else numbered
        names = [name for name in every[0] if name not in ("text", "is_trained")]
        masked = not all(token["is_trained"] for token in every)
        rows = [
            [
                str(place),
                *(str(token[name]) if name == "token" else _number(token[name]) for name in names),
                *(["" if token["is_trained"] else "masked"] if masked else []),
                "" if token["text"] is None else f"'{printable(token['text'])}'",
            ]
            for place, token in shown
        ]
        heads = ["", *(LETTERS.get(name, name) for name in names), *(["mask"] if masked else []), "text"]
        table = _table(heads, rows, left=1 + masked)
        if cut:
            gap = f"    ... {len(every) - len(shown)} more; --tokens 0 shows all ..."
            table = [*table[: 1 + half], gap, *table[1 + half :]]
        yield "  tokens"
        yield from ("  " + line for line in table)


def _latents(facts: Facts) -> Iterator[str]:
    latents = facts["latents"]
    options = "".join(f", {name} {value}" for name, value in latents["options"].items())
    yield from _line("kernel", f"{latents['kernel']}, eta {_number(latents['eta'])}{options}")
    scale = latents["guidance_scale"]
    options = "".join(f", {name} {value}" for name, value in latents["guidance_options"].items())
    yield from _line("guidance", f"scale {_number(scale)}, {latents['guidance_mode']}{options}")
    sigmas = " ".join(_number(sigma) for sigma in latents["sigmas"])
    yield from _line("sigmas", f"{sigmas} ({len(latents['sigmas']) - 1} steps)")
    noise, count = latents["initial_noise"], latents["num_same_initial_noise"]
    start = f"; x_T {noise}" if noise else ""
    start += f", that of {count} samples" if count and count > 1 else ""
    yield from _line("noise", f"run.seed {latents['seed']}, rollout {latents['rollout']}{start}")
    if latents["draws"] is not None:
        yield from _line("drawn points", ", ".join(map(str, latents["draws"])))
    if facts["media"]:
        yield from _line("file", facts["media"])
    steps, stochastic = latents["steps"], latents["sde_steps"]
    trained = [step["step"] for step in steps]
    if stochastic != trained:
        yield from _line("SDE steps", ", ".join(map(str, stochastic)) or "none")
    if steps:
        names = [name for name in steps[0] if name not in ("step", "noise")]
        shared = any(step["noise"] != facts["sample"] for step in steps)
        rows = [
            [
                str(step["step"]),
                f"{_number(latents['sigmas'][step['step']])} to {_number(latents['sigmas'][step['step'] + 1])}",
                *(_number(step[name]) for name in names),
                *([printable(step["noise"])] if shared else []),
            ]
            for step in steps
        ]
        heads = ["step", "sigma", *(LETTERS.get(name, name) for name in names), *(["noise key"] if shared else [])]
        yield "  steps trained on" if facts["algorithm"] else "  steps scored"
        yield from ("  " + line for line in _table(heads, rows, left=int(shared)))


def _scores(facts: Facts) -> Iterator[str]:
    reward, group = facts["reward"], facts["group_rewards"]
    if reward is not None:
        place = f"   group: mean {_number(group['mean'])}, std {_number(group['std'])}, "
        place += f"place {group['rank']} of {group['num_scored']}" if group["rank"] else "not scored"
        yield from _line("reward", f"{_number(reward)}{place}")
    elif facts["rewards"]:
        yield from _line("reward", "none: a score is missing")
    rows: list[list[str]] = []
    for each in facts["rewards"]:
        weighted = None if None in (each["value"], each["weight"]) else each["value"] * each["weight"]
        name = f"credit of {each['name']}" if each["kind"] == "credit" else each["name"]
        rows.append([printable(name), _number(each["value"]), _number(each["weight"]), _number(weighted)])
        rows += [[f"  {printable(part)}", _number(value), "", ""] for part, value in each["parts"].items()]
    if rows:
        yield from ("  " + line for line in _table(["", "score", "weight", "counts"], rows, first_left=True))
    if facts["advantage"] is not None:
        yield from _line("advantage", _number(facts["advantage"], signed=True))
    elif facts["no_advantage"]:
        yield from _line("advantage", f"none: {facts['no_advantage']}")


def _media(refs: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for ref in refs:
        yield from _line(ref["role"], f"{ref['modality']} {ref['uri']}")


def _line(name: str, value: str) -> list[str]:
    return _wrapped(value, indent=LABEL + 2, first=f"  {printable(name):<{LABEL}}")


def _wrapped(value: str, *, indent: int, first: str | None = None) -> list[str]:
    lead = " " * indent if first is None else first if len(first) <= indent else f"{first} "
    return textwrap.wrap(
        printable(value), WIDTH, initial_indent=lead, subsequent_indent=" " * indent, break_on_hyphens=False
    ) or [lead]


def _block(text: str) -> Iterator[str]:
    """A text with its own lines, each broken where it is too long."""
    for line in text.split("\n"):
        yield from (
            f"    {part}" for part in (textwrap.wrap(printable(line), WIDTH - 4, drop_whitespace=False) or [""])
        )


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0, first_left: bool = False
) -> list[str]:
    """Rows in columns, to the right but for the last `left` ones, and the first one with `first_left`."""
    every = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads))]
    result: list[str] = []
    for row in every:
        cells = [
            cell.ljust(width) if column >= len(heads) - left or (first_left and column == 0) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        result.append("  " + "  ".join(cells))
    return result


def _note(sample: Facts) -> str:
    """What is out of the ordinary about a sample."""
    notes = [sample["status"]] if sample["status"] != "completed" else []
    notes += ["weight 0"] if sample["weight"] == 0 else []
    return "".join(f"[{note}] " for note in notes)


def _snippet(text: str) -> str:
    return shortened(printable(" ".join(text.split())), WIDTH)


def _number(value: Any, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    sign = "+" if signed else ""
    if not isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):{sign}d}"
    return f"{value:{sign}.4f}" if 1e-4 <= abs(value) < 1e6 else f"{value:{sign}.2e}"
