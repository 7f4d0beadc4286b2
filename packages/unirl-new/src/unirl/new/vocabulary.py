"""The tokenizer of a checkpoint with few tokens, so that a miniature's embeddings are small."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SMALL", "reduce_ids", "reduce_vocabulary"]

SMALL = 2048
"""Tokens of a vocabulary that stays as it is."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_ID_KEY = re.compile(r"(_token_ids?|token_index)$")
_OTHER_FORMS = ("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt")
"""Files of a tokenizer that say what tokenizer.json says."""


def reduce_vocabulary(folder: Path) -> dict[int, int]:
    """Take all tokens but single bytes or ASCII characters and the added ones out of tokenizer.json; every text still
    has tokens. Returns id -> new id, empty where the vocabulary stays: one that is small, or not of BPE or Unigram.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    whole: dict[str, Any] = json.loads(file.read_text("utf-8"))
    model, added = whole["model"], whole.get("added_tokens") or []
    vocabulary = model.get("vocab") or {}
    if len(vocabulary) <= SMALL or model.get("type") not in ("BPE", "Unigram"):
        return {}
    is_unigram = model["type"] == "Unigram"
    pairs: list[tuple[str, Any]] = [(p, s) for p, s in vocabulary] if is_unigram else list(vocabulary.items())
    old = {piece: index for index, (piece, _) in enumerate(pairs)} if is_unigram else dict(pairs)
    stays = {token["content"] for token in added} | {model.get("unk_token")}
    if is_unigram and model.get("unk_id") is not None:
        stays.add(pairs[model["unk_id"]][0])
    alphabet = _byte_alphabet()
    kept = [piece for piece in old if piece in stays or _is_single(piece, alphabet)]
    kept.sort(key=old.__getitem__)
    new = {piece: index for index, piece in enumerate(kept)}
    ids = {old[piece]: index for piece, index in new.items()}
    for token in sorted(added, key=lambda token: token["id"]):
        if token["content"] not in new:
            new[token["content"]] = ids[token["id"]] = len(new)
        token["id"] = new[token["content"]]
    if is_unigram:
        scores = dict(pairs)
        model["vocab"] = [[piece, scores[piece]] for piece in kept]
        if model.get("unk_id") is not None:
            model["unk_id"] = ids[model["unk_id"]]
    else:
        model["vocab"], model["merges"] = {piece: new[piece] for piece in kept}, []
    whole["post_processor"] = _renumbered(whole.get("post_processor"), new)
    file.write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    for name in _OTHER_FORMS:
        (folder / name).unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        values = json.loads(settings.read_text("utf-8"))
        named = values.get("added_tokens_decoder")
        if named:
            values["added_tokens_decoder"] = {
                str(ids[int(key)]): each for key, each in named.items() if int(key) in ids
            }
            settings.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return ids


def reduce_ids(value: Any, ids: Mapping[int, int], *, key: str = "") -> Any:
    """A configuration with the ids of tokens, and the sizes of the vocabulary, replaced; ids that are gone are None."""
    if isinstance(value, dict):
        return {name: reduce_ids(each, ids, key=name) for name, each in value.items()}
    if key == "vocab_size":
        return len(ids)
    if _ID_KEY.search(key) and isinstance(value, int):
        return ids.get(value)
    if _ID_KEY.search(key) and isinstance(value, list):
        return [ids[each] for each in value if each in ids]
    return value


def _is_single(piece: str, alphabet: frozenset[str]) -> bool:
    letter = piece.removesuffix("</w>")
    return letter in alphabet or bool(_BYTE.fullmatch(piece))


def _byte_alphabet() -> frozenset[str]:
    """Characters that stand for bytes in byte-level BPE, ASCII among them, and the space of SentencePiece."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return frozenset([*map(chr, printable), *(chr(256 + index) for index in range(256 - len(printable))), "▁"])


def _renumbered(value: Any, new: Mapping[str, int]) -> Any:
    """Ids of special tokens in a post-processor, which are beside their names."""
    if isinstance(value, list):
        if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int) and value[0] in new:
            return [value[0], new[value[0]]]
        return [_renumbered(each, new) for each in value]
    if isinstance(value, dict):
        result = {name: _renumbered(each, new) for name, each in value.items()}
        if "ids" in result and "tokens" in result:
            result["ids"] = [new[token] for token in result["tokens"]]
        return result
    return value
