"""Prompts: reading prompt files, and the order in which a run goes through them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ..errors import DataError
from ..names import shortened
from ..types.data import MediaRef, Prompt
from .columns import Columns, is_json, local_uri
from .rows import Reading, kind_of, read_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PromptOrder", "kind_of", "read_prompts", "refuse"]

# Composing a recipe reads its prompts and draws no order, so it does not wait for numpy.
Indices: TypeAlias = "NDArray[np.int64]"

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
    path: Path,
    *,
    prompt_key: str = "prompt",
    columns: Columns | None = None,
    settings: Mapping[str, str] | None = None,
) -> Sequence[Prompt]:
    """The prompts of a file or folder, in its order.

    `.txt`: one a line.  `.jsonl`: one object a line.  `.json`: a list of strings or objects, or an object with such a
    list (or one string) under `prompts`, `caption` or `prompt_key`.  `.csv`, `.parquet`, a folder of
    `Dataset.save_to_disk`: an object a row, without its empty cells.  A folder of images: `prompt` from the text file
    beside each `image`.  Empty lines are left out.

    An object has `prompt` (or `caption`), and may have `prompt_id` (else `<file name>:<index>`), `metadata` (else
    every further key is metadata) and `media` (or `media_refs`), a list of {modality, role, uri}. Relative URIs start
    at the file's folder. Keys named after a role of media may hold images as `datasets` and parquet keep them.

    columns: columns of the data under other names.  settings: key of a row -> key of the recipe, for settings that are
    refused as metadata.
    Raises DataError for anything else, for ids that repeat and for local media that are missing: a line for each
    problem, with file and line.
    """
    if str(path).startswith(REMOTE_PATHS):
        raise DataError(f"{path}: got a URL, expected a file on this machine; download it first.")
    names = columns or Columns()
    row = _RowReader(path, prompt_key, names, settings or {})
    reading = Reading(prompt_key=prompt_key, unread=names.unread, check=names.check)
    prompts, problems, keys = list[Prompt](), list[tuple[str, str]](), set[str]()
    first: dict[str, str] = {}
    for index, (where, values) in enumerate(read_rows(path, reading)):
        if isinstance(values, dict):
            keys.update(cast(dict[str, object], values))
        try:
            prompt = row.prompt(cast(object, values), where=where, index=index)
        except DataError as error:
            problems.append((where, str(error).removeprefix(f"{where}: ")))
            continue
        if prompt.prompt_id in first:
            earlier = first[prompt.prompt_id]
            text = f"duplicate prompt_id {prompt.prompt_id!r}, first used in {earlier}; ids must be unique."
            problems.append((where, text))
        first.setdefault(prompt.prompt_id, where)
        prompts.append(prompt)
    if path.suffix.lower() in (".json", ".jsonl") and (keys or not problems):
        names.check(path, keys)
    refuse(problems)
    if not prompts:
        raise DataError(f"{path}: the prompt file contains no prompts.")
    return prompts


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

    def spare(self, step: int, most: int) -> tuple[int, ...]:
        """Indices of up to `most` of the prompts that are not in a step, in a random order drawn for that step."""
        import numpy as np

        chosen = np.array(self.step(step), dtype=np.int64)
        others = _without(np.arange(self.num_prompts), chosen)
        bits = np.random.Philox(key=np.array([self.seed % 2**64, 2**63 + step], dtype=np.uint64))
        return tuple(int(index) for index in _permuted(others, bits)[:most])

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


@dataclass(frozen=True)
class _RowReader:
    """Makes prompts of the rows of one file."""

    path: Path
    prompt_key: str
    columns: Columns
    settings: Mapping[str, str]

    def prompt(self, row: object, *, where: str, index: int) -> Prompt:
        if isinstance(row, DataError):
            raise row
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, dict):
            raise DataError(f"{where}: got {kind_of(row)}, expected an object with 'prompt', or a string.")
        table = self.columns.mapped(cast(dict[str, Any], row))
        if legacy := [key for key in table if key in EMBEDDING_KEYS]:
            raise DataError(
                f"{where}: {legacy[0]!r} holds precomputed embeddings, which are not used: prompts are encoded during "
                "the run. Remove the key."
            )
        named = [key for key in dict.fromkeys(("prompt", "caption", self.prompt_key)) if key in table]
        if not named:
            raise DataError(f"{where}: no 'prompt' (or 'caption'); got {sorted(table) or 'an empty object'}.")
        text = table[named[0]]
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: {named[0]!r} must be a non-empty string; got {_shown(text)}.")
        _check_text(text, f"{where}: {named[0]!r}")
        prompt_id = table.get("prompt_id", f"{self.path.name}:{index}")
        if not isinstance(prompt_id, (str, int)) or isinstance(prompt_id, bool) or prompt_id == "":
            raise DataError(f"{where}: 'prompt_id' must be a non-empty string; got {_shown(prompt_id)}.")
        media = _media(table, where=where, path=self.path)
        media += self.columns.media_of(table, where=where, path=self.path)
        metadata = self._metadata(table, where)
        return Prompt(prompt_id=str(prompt_id), text=text, metadata=metadata, media=media, where=where)

    def _metadata(self, table: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        others = {key: value for key, value in table.items() if key not in (*OWN_KEYS, self.prompt_key)}
        if misplaced := [key for key in others if key in self.settings]:
            key = misplaced[0]
            raise DataError(
                f"{where}: {key!r} cannot be set for one row; {self.settings[key]} sets it for all. Leave the column "
                f"out with data.columns.{key}=null. If a reward is to read it, rename it, such as "
                f"data.columns.row_{key}={key}, or move it under 'metadata'."
            )
        metadata = table.get("metadata")
        if metadata is None:
            metadata = others
        elif not isinstance(metadata, dict):
            raise DataError(f"{where}: 'metadata' must be an object; got {kind_of(metadata)}.")
        for key, value in cast(dict[str, Any], metadata).items():
            if not is_json(value):
                raise DataError(
                    f"{where}: {key!r} holds {kind_of(value)} {value!r:.60}, which is not JSON; convert the column to "
                    f"text or numbers, or leave it out with data.columns.{key}=null."
                )
        return cast(dict[str, Any], metadata)


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


def _media(row: Mapping[str, Any], *, where: str, path: Path) -> tuple[MediaRef, ...]:
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
        refs.append(
            MediaRef(
                modality=values["modality"],
                role=values["role"],
                uri=local_uri(values["uri"], path.parent, f"{place}.uri"),
            )
        )
    return tuple(refs)


def _shown(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False), 80)
