"""Reasons in a checkpoint's own files not to train with it. Imports no torch: recipes are checked with it, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open
from unirl.core.errors import RecipeError
from unirl.core.limits import Reason
from unirl.core.specs.facts import near_endings

from .model_files import read_json

if TYPE_CHECKING:
    from unirl.core.specs.part_config import PartConfig
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["checkpoint_problems", "lora_problems", "media_tokens", "past_embedding"]

_TEXT_TOKENS = frozenset(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def checkpoint_problems(path: str, *, trains: bool = True) -> Iterator[Reason]:
    """Quantized weights, and tokenizers with more tokens than their model has embeddings, in a local folder in the
    layout of transformers or of diffusers.

    trains: False for a model that only scores, whose weights may be quantized.

    Loading reports what is missing, and checks tokens again that only libraries can count.
    """
    folder = Path(path).expanduser()
    try:
        for part in _parts(folder):
            settings = read_json(folder / part / "config.json")
            if trains:
                yield from _quantized(folder / part, settings)
            # Of a pipeline: tokenizer_2 is that of text_encoder_2.
            tokenizer = part.replace("text_encoder", "tokenizer")
            if not part or tokenizer != part:
                yield from _too_many_tokens(folder / tokenizer, settings)
    except RecipeError as error:
        yield Reason(key=".path", text=str(error).removeprefix("model.path: "))


def lora_problems(
    config: PartConfig, plan: Plan | None, stage: Stage | None, *, projection: str = ""
) -> Iterator[Reason]:
    """LoRA targets that no weight in the checkpoint is named after. Modules may rename what comes before the layer, so
    the last component alone is compared; when the model is there, all of a target is.

    config: of the model.  projection: last component of the name of the output projection of a language model, which
    takes no adapter.
    """
    if plan is None or stage is None or stage.backend is None or stage.model.config is not config:
        return
    memory = stage.backend.config.memory(plan)
    if memory is None or not memory.lora_rank or not memory.lora_targets:
        return
    folder = Path(str(getattr(config, stage.model.spec.path_key))).expanduser()
    names = _weights(folder)
    ends = {name.rpartition(".")[2] for name in names}
    for target in memory.lora_targets:
        end, text = target.rpartition(".")[2], ""
        if end == projection:
            text = f"got {target!r}, but log-probs are computed from the output projection itself. Leave it out."
        elif ends and end not in ends:
            text = f"{target!r} matches no layer in the weights of {str(folder)!r}. {near_endings(target, names)}"
        if text:
            yield Reason(key=f"{stage.backend.key}.lora.targets", text=text)


def past_embedding(tokens: Mapping[str, int], *, rows: int, media: frozenset[str], where: str) -> str:
    """Why a tokenizer does not fit its model, as a sentence; empty if it does.

    tokens: token -> its id.  rows: of the embedding.  media: tokens that stand for media, which a model of texts never
    reads: checkpoints of texts alone may keep those of their family.
    """
    past = {token: index for token, index in tokens.items() if index >= rows and token not in media}
    if not past:
        return ""
    token, index = max(past.items(), key=lambda item: item[1])
    more = f" and {len(past) - 1} more" if past.keys() - {token} else ""
    return (
        f"the tokenizer in {where!r} has the token {token!r} with id {index}{more}, expected ids below {rows}, the "
        "rows of the model's embedding. Use the checkpoint's own tokenizer, or save the model with a larger embedding: "
        "`model.resize_token_embeddings(len(tokenizer))` of transformers."
    )


def media_tokens(folder: Path) -> frozenset[str]:
    """Tokens that the tokenizer in a folder has for images, sound or videos, for a model of texts alone."""
    if "vision_config" in _json(folder / "config.json"):
        return frozenset()
    named = _named(_json(folder / "tokenizer_config.json"))
    return frozenset(token for token, key in named.items() if key.endswith("_token") and key not in _TEXT_TOKENS)


def _parts(folder: Path) -> list[str]:
    """Subfolders with a model; "" is the folder itself."""
    if (folder / "model_index.json").is_file():
        index = read_json(folder / "model_index.json")
        named = [name for name, value in index.items() if isinstance(value, list)]
        return [name for name in named if (folder / name / "config.json").is_file()]
    return [""] if (folder / "config.json").is_file() else []


def _quantized(folder: Path, settings: Mapping[str, Any]) -> Iterator[Reason]:
    for one in (settings, settings.get("text_config")):
        method = one.get("quantization_config") if isinstance(one, dict) else None
        if isinstance(method, dict) and method:
            kind = cast("dict[str, Any]", method).get("quant_method", "an unnamed method")
            text = (
                f"{str(folder)!r} is quantized with {kind}, by the quantization_config in its config.json; quantized "
            )
            text += "weights cannot be trained, nor receive updates. Use the checkpoint that it was made from, or save "
            text += (
                "this one without quantization: `model.dequantize()` of transformers. To train adapters on weights in "
            )
            text += "8 or 4 bits, set backend.quantize: it quantizes an ordinary checkpoint."
            yield Reason(key=".path", text=text)
            return


def _too_many_tokens(folder: Path, settings: Mapping[str, Any]) -> Iterator[Reason]:
    text = settings.get("text_config")
    inner: Any = text if isinstance(text, dict) else {}
    rows = inner.get("vocab_size", settings.get("vocab_size"))
    if isinstance(rows, int) and rows > 0:
        try:
            tokens, media = _tokens(folder), media_tokens(folder)
        except (AttributeError, LookupError, TypeError):
            return  # another format, which loading reports
        if problem := past_embedding(tokens, rows=rows, media=media, where=str(folder)):
            yield Reason(key=".path", text=problem)


def _tokens(folder: Path) -> dict[str, int]:
    """Token -> id, as transformers gives them; empty for a tokenizer of another format."""
    files = [folder / name for name in ("tokenizer.json", "vocab.json")]
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        return {}
    state = file.stat()
    result = dict(_vocabulary(file, state.st_mtime_ns, state.st_size))
    further = [*_json(folder / "added_tokens.json"), *_named(_json(folder / "tokenizer_config.json"))]
    further += _named(_json(folder / "special_tokens_map.json"))
    # A token that is named and has no id becomes the next one.
    for token in dict.fromkeys(further):
        if token not in result:
            result[token] = max(result.values(), default=-1) + 1
    return result


@lru_cache(maxsize=8)
def _vocabulary(file: Path, *version: int) -> Mapping[str, int]:
    """version: of the file, for the cache: a large vocabulary takes tenths of a second to read."""
    del version
    content = read_json(file)
    if file.name == "vocab.json":
        return content
    vocabulary: Any = content.get("model", {}).get("vocab", {})
    # Unigram has a list of tokens with their scores.
    is_list = isinstance(vocabulary, list)
    result: dict[str, int] = {row[0]: at for at, row in enumerate(vocabulary)} if is_list else dict(vocabulary)
    return result | {one["content"]: one["id"] for one in content.get("added_tokens", [])}


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """Token -> the key that names it, in the settings of a tokenizer."""
    result: dict[str, str] = {}

    def add(key: str, value: Any) -> None:
        token = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            result.setdefault(token, key)

    for key, value in settings.items():
        if key.endswith("_token"):
            add(key, value)
        elif key in ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"):
            several: Any = value
            for one in several.items() if isinstance(several, dict) else ((key, token) for token in several or ()):
                add(*one)
        elif key == "added_tokens_decoder":
            for one in value.values():
                add(key, one)
    return result


def _weights(folder: Path) -> list[str]:
    """Names of the layers with weights in the files of a checkpoint; of a pipeline, those of its transformers."""
    parts = _parts(folder) or [""]
    parts = [part for part in parts if part.startswith("transformer")] or parts
    names: set[str] = set()
    for part in parts:
        files = {file.name: file for file in (folder / part).glob("*.safetensors")}
        for index in (folder / part).glob("*.safetensors.index.json"):
            listed: dict[str, str] = _json(index).get("weight_map", {})
            names |= listed.keys()
            files = {name: file for name, file in files.items() if name not in listed.values()}
        for file in files.values():
            # Loading reports a damaged file.
            with suppress(OSError, SafetensorError), safe_open(file, framework="np") as opened:
                names |= set(cast("list[str]", opened.keys()))
    return [name.removesuffix(".weight") for name in sorted(names) if name.endswith(".weight")]


def _json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
