"""Prompts: reading prompt files, and the order in which a run goes through them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ..errors import DataError
from ..names import shortened
from ..types.data import MediaRef, Prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PromptOrder", "kind_of", "read_prompts", "refuse"]

# Composing a recipe reads its prompts and draws no order, so it does not wait for numpy.
Indices: TypeAlias = "NDArray[np.int64]"

FORMATS = (".txt", ".jsonl", ".json")
REMOTE = ("http://", "https://", "s3://", "gs://")
REMOTE_PATHS = ("http:/", "https:/", "s3:/", "gs:/", "hf:/")
"""The same as `Path` writes them, which takes two slashes for one."""
MOST_PROBLEMS = 10
"""Problems of a file that are shown."""
MAX_PROMPT_BYTES = 2**18
"""Longest prompt. No model takes as much, and a tokenizer would need minutes to reject it."""
OWN_KEYS = ("prompt", "caption", "prompt_id", "metadata", "media", "media_refs")
EMBEDDING_KEYS = (
    "prompt_embed_path",
    "prompt_embeds",
    "prompt_embeds_path",
    "pooled_prompt_embeds",
    "pooled_prompt_embeds_path",
    "negative_prompt_embeds",
    "prompt_attention_mask",
)
"""Precomputed embeddings of older data sets. Text encoders run at rollout time, so these would be stale."""


def read_prompts(
    path: Path, *, prompt_key: str = "prompt", settings: Mapping[str, str] | None = None
) -> tuple[Prompt, ...]:
    """The prompts of a file, in its order.

    `.txt`: one a line.  `.jsonl`: one object a line.  `.json`: a list of strings or objects, or an object with such a
    list (or one string) under `prompts`, `caption` or `prompt_key`.  Empty lines of `.txt` and `.jsonl` are left out.

    An object has `prompt` (or `caption`), and may have `prompt_id` (else `<file name>:<index>`), `metadata` (else
    every further key is metadata) and `media` (or `media_refs`), a list of {modality, role, uri}. Relative URIs start
    at the file's folder.

    settings: key of a row -> key of the recipe, for settings that are refused as metadata.
    Raises DataError for anything else, for ids that repeat and for local media that are missing: a line for each
    problem, with file and line.
    """
    if str(path).startswith(REMOTE_PATHS):
        raise DataError(f"{path}: got a URL, expected a file on this machine; download it first.")
    if path.suffix not in FORMATS:
        ending = f"suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise DataError(f"{path}: got {ending}, expected a prompt file ending in {', '.join(FORMATS)}.")
    try:
        # A byte order mark is not part of the first prompt.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such prompt file.") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not UTF-8 text (byte {error.start}); save the file as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path}: the prompt file cannot be read: {error.strerror or error}.") from error
    prompts: list[Prompt] = []
    problems: list[tuple[str, str]] = []
    first: dict[str, str] = {}
    for index, (where, row) in enumerate(_rows(path, text, prompt_key)):
        try:
            prompt = _prompt(row, where=where, path=path, index=index, prompt_key=prompt_key, settings=settings or {})
        except DataError as error:
            problems.append((where, str(error).removeprefix(f"{where}: ")))
            continue
        if prompt.prompt_id in first:
            earlier = first[prompt.prompt_id]
            text = f"duplicate prompt_id {prompt.prompt_id!r}, first used in {earlier}; ids must be unique."
            problems.append((where, text))
        first.setdefault(prompt.prompt_id, where)
        prompts.append(prompt)
    refuse(problems)
    if not prompts:
        raise DataError(f"{path}: the prompt file contains no prompts.")
    return tuple(prompts)


def refuse(problems: Sequence[tuple[str, str]]) -> None:
    """Raise a DataError that lists the problems, (place, text) each, if there are any. The same text is listed once,
    with the number of its places, and at most `MOST_PROBLEMS` texts are listed."""
    places: dict[str, list[str]] = {}
    for where, text in problems:
        places.setdefault(text, []).append(where)
    lines = [
        f"{where[0]}: {text}" + (f" {len(where) - 1} more rows have this." if where[1:] else "")
        for text, where in places.items()
    ]
    if len(lines) > MOST_PROBLEMS:
        lines[MOST_PROBLEMS:] = [f"{len(lines) - MOST_PROBLEMS} more problems follow."]
    if lines:
        raise DataError("\n".join(lines))


@dataclass(frozen=True)
class PromptOrder:
    """Which prompts each step takes: a pure function of the step number, so resuming needs nothing else.

    Every epoch has each prompt once, in an order drawn from (seed, epoch) or, without `shuffle`, in file order.
    A step that an epoch ends in is filled up from the next epoch, so nothing is dropped; the next epoch's order then
    starts with prompts that are not in this step yet, so a step never has a prompt twice.
    """

    num_prompts: int
    prompts_per_step: int
    seed: int = 0
    shuffle: bool = True
    _drawn: dict[int, Indices] = field(
        default_factory=lambda: dict[int, Indices](), init=False, repr=False, compare=False
    )
    """Cached orders of the last two epochs used; drawing them again gives the same."""

    def __post_init__(self) -> None:
        if not 1 <= self.prompts_per_step <= self.num_prompts:
            raise DataError(
                f"data.prompts_per_step: got {self.prompts_per_step}, expected 1 to {self.num_prompts}, the number of "
                "prompts."
            )

    def step(self, step: int) -> tuple[int, ...]:
        """Indices of the prompts of a step, counted from 0."""
        import numpy as np

        if step < 0:
            raise ValueError(f"got step {step}, expected 0 or more; steps count from 0.")
        first = step * self.prompts_per_step
        epoch, offset = divmod(first, self.num_prompts)
        result = self._epoch(epoch)[offset : offset + self.prompts_per_step]
        if len(result) < self.prompts_per_step:
            result = np.concatenate([result, self._epoch(epoch + 1)[: self.prompts_per_step - len(result)]])
        return tuple(int(index) for index in result)

    def spare(self, step: int) -> tuple[int, ...]:
        """Indices of the prompts that are not in a step, in a random order drawn for that step."""
        import numpy as np

        chosen = np.array(self.step(step), dtype=np.int64)
        others = _without(np.arange(self.num_prompts), chosen)
        bits = np.random.Philox(key=np.array([self.seed % 2**64, 2**63 + step], dtype=np.uint64))
        return tuple(int(index) for index in _permuted(others, bits))

    def _epoch(self, epoch: int) -> Indices:
        """Order of one epoch. It depends on the one before only through the step that both share."""
        import numpy as np

        if not self.shuffle:
            return np.arange(self.num_prompts)
        # Epochs that begin with a step depend on none before; there is one at least every `prompts_per_step` epochs.
        start = epoch
        while start not in self._drawn and start * self.num_prompts % self.prompts_per_step:
            start -= 1
        for number in range(start, epoch + 1):
            if number not in self._drawn:
                open_rows = number * self.num_prompts % self.prompts_per_step
                shared = self._drawn[number - 1][self.num_prompts - open_rows :] if open_rows else None
                self._drawn[number] = self._draw(number, shared)
        for number in [n for n in self._drawn if n < epoch - 1]:
            del self._drawn[number]
        return self._drawn[epoch]

    def _draw(self, epoch: int, shared: Indices | None) -> Indices:
        """A uniform order among those whose first rows, which complete a step that has `shared`, avoid `shared`."""
        import numpy as np

        bits = np.random.Philox(key=np.array([self.seed % 2**64, epoch], dtype=np.uint64))
        order = _permuted(np.arange(self.num_prompts), bits)
        if shared is None:
            return order
        head = _without(order, shared)[: self.prompts_per_step - len(shared)]
        return np.concatenate([head, _permuted(_without(order, head), bits)])


def _without(order: Indices, left_out: Indices) -> Indices:
    import numpy as np

    keep = np.ones(int(order.max()) + 1, dtype=np.bool_)
    keep[left_out] = False
    return order[keep[order]]


def _permuted(values: Indices, bits: np.random.Philox) -> Indices:
    """Sorted by raw random words: NumPy keeps those for ever, while its `permutation` may change between versions."""
    import numpy as np

    return values[np.argsort(bits.random_raw(len(values)), kind="stable")]


def _rows(path: Path, text: str, prompt_key: str) -> Iterator[tuple[str, object]]:
    """Each row, or its error, with its location: `file:line`, or `file[index]` where the line is not known."""
    if path.suffix == ".json":
        yield from _json_rows(path, text, prompt_key)
        return
    # Not splitlines: a prompt may contain a line separator such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield where, line.strip() if path.suffix == ".txt" else _parsed(line, where, path, first_line=number)
        except DataError as error:
            yield where, error


def _json_rows(path: Path, text: str, prompt_key: str) -> Iterator[tuple[str, object]]:
    if not text.strip():
        return
    data = _parsed(text, str(path), path, first_line=1)
    key = ""
    if isinstance(data, dict):
        table = cast(dict[str, object], data)
        result = [name for name in dict.fromkeys(("prompts", "caption", prompt_key)) if name in table]
        if not result:
            raise DataError(
                f"{path}: the object has no 'prompts', 'caption' or {prompt_key!r} (data.prompt_key); "
                f"it has {sorted(table) or 'nothing'}."
            )
        key = result[0]
        data = [table[key]] if isinstance(table[key], str) else table[key]
    if not isinstance(data, list):
        raise DataError(f"{path}: got {kind_of(data)}{f' under {key!r}' if key else ''}, expected a list of prompts.")
    lines = _line_numbers(text, key)
    rows = cast(list[object], data)
    for index, row in enumerate(rows):
        line = lines[index] if len(lines) == len(rows) else None
        yield f"{path}:{line}" if line else f"{path}[{index}]", row


def _line_numbers(text: str, key: str) -> list[int]:
    """Line on which each item of the list begins; the list is the whole file, or the value of `key`."""
    decoder = json.JSONDecoder()
    at = 0
    if key:
        quoted = json.dumps(key)
        at = text.find(quoted) + len(quoted)
    at = text.find("[", at) + 1
    numbers: list[int] = []
    while at:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
        try:
            _, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            break
        numbers.append(text.count("\n", 0, at) + 1)
        at = end
    return numbers


def _parsed(text: str, where: str, path: Path, *, first_line: int) -> object:
    def no_number(word: str) -> object:
        raise DataError(f"{where}: {word} is not JSON; write a number, or null.")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{where}: duplicate key {twice!r} in one object; keep one.")
        return table

    try:
        return json.loads(text, parse_constant=no_number, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{first_line + error.lineno - 1}: not JSON: {error.msg} at column {error.colno}."
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply to be read.") from error


def _prompt(row: object, *, where: str, path: Path, index: int, prompt_key: str, settings: Mapping[str, str]) -> Prompt:
    if isinstance(row, DataError):
        raise row
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise DataError(f"{where}: got {kind_of(row)}, expected an object with 'prompt', or a string.")
    table = cast(dict[str, Any], row)
    legacy = [key for key in table if key in EMBEDDING_KEYS]
    if legacy:
        raise DataError(
            f"{where}: {legacy[0]!r} holds precomputed embeddings, which are not used: prompts are encoded during the "
            "run. Remove the key."
        )
    named = [key for key in dict.fromkeys(("prompt", "caption", prompt_key)) if key in table]
    if not named:
        raise DataError(f"{where}: no 'prompt' (or 'caption'); got {sorted(table) or 'an empty object'}.")
    text = table[named[0]]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: {named[0]!r} must be a non-empty string; got {_shown(text)}.")
    _check_text(text, f"{where}: {named[0]!r}")
    prompt_id = table.get("prompt_id", f"{path.name}:{index}")
    if not isinstance(prompt_id, (str, int)) or isinstance(prompt_id, bool) or prompt_id == "":
        raise DataError(f"{where}: 'prompt_id' must be a non-empty string; got {_shown(prompt_id)}.")
    metadata = table.get("metadata")
    if metadata is None:
        metadata = {key: value for key, value in table.items() if key not in (*OWN_KEYS, prompt_key)}
        if misplaced := [key for key in metadata if key in settings]:
            raise DataError(
                f"{where}: {misplaced[0]!r} cannot be set for one row; {settings[misplaced[0]]} sets it for all. If a "
                "reward is to read it, move it under 'metadata', else remove it."
            )
    elif not isinstance(metadata, dict):
        raise DataError(f"{where}: 'metadata' must be an object; got {kind_of(metadata)}.")
    media = _media(table, where=where, folder=path.parent)
    fields = cast(dict[str, Any], metadata)
    return Prompt(prompt_id=str(prompt_id), text=text, metadata=fields, media=media, where=where)


def _check_text(text: str, what: str) -> None:
    """Refuse text that no tokenizer accepts."""
    if "\0" in text:
        raise DataError(f"{what} contains a NUL character at position {text.index(chr(0))}; remove it.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} contains an unpaired surrogate at position {error.start}, which is not a character; remove it."
        ) from error
    if size > MAX_PROMPT_BYTES:
        raise DataError(f"{what} is {size} bytes long; the limit is {MAX_PROMPT_BYTES}.")


def _media(row: Mapping[str, Any], *, where: str, folder: Path) -> tuple[MediaRef, ...]:
    keys = [key for key in ("media", "media_refs") if row.get(key) is not None]
    if len(keys) == 2:
        raise DataError(f"{where}: got both 'media' and 'media_refs'; keep one.")
    if not keys:
        return ()
    items = row[keys[0]]
    if not isinstance(items, list):
        raise DataError(f"{where}: {keys[0]!r} must be a list of {{modality, role, uri}}; got {kind_of(items)}.")
    refs: list[MediaRef] = []
    for number, item in enumerate(cast(list[object], items)):
        place = f"{where}: {keys[0]}[{number}]"
        fields = cast(dict[str, object], item) if isinstance(item, dict) else {}
        if set(fields) != {"modality", "role", "uri"}:
            raise DataError(f"{place} must have exactly modality, role and uri; got {_shown(cast(object, item))}.")
        empty = [key for key, value in fields.items() if not isinstance(value, str) or not value]
        if empty:
            raise DataError(f"{place}.{empty[0]} must be a non-empty string; got {_shown(fields[empty[0]])}.")
        values = cast(dict[str, str], fields)
        refs.append(MediaRef(modality=values["modality"], role=values["role"], uri=_uri(values["uri"], folder, place)))
    return tuple(refs)


def _uri(uri: str, folder: Path, place: str) -> str:
    if uri.startswith(REMOTE):
        return uri
    if "://" in uri:
        raise DataError(f"{place}.uri: got {uri!r}, expected a path or a URI with {', '.join(REMOTE)}.")
    file = (folder / uri).absolute()
    if not file.is_file():
        raise DataError(f"{place}.uri: got {uri!r}, but there is no file {file}.")
    return str(file)


def kind_of(value: object) -> str:
    """Kind of a JSON value, in words: `text`, `a number`, `a boolean`, `a list`, `an object`, `null`."""
    names = {"dict": "an object", "list": "a list", "str": "text", "bool": "a boolean", "NoneType": "null"}
    return names.get(type(value).__name__, "a number")


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False), 80)
