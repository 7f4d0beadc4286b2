"""Prompt templates: what a judge is asked, and how its answer becomes a score.

A template is a TOML file:

    version = "1"
    answer = "json"            # or "marker"
    text = '''... {prompt} ... {metadata.KEY} ...'''

    [scores.NAME]              # one or more
    range = [1, 5]             # the values that the text asks for

A text that compares two completions has {first} and {second} as well.
Optional: `needs_source` (the source image of an edit is shown first), `ignores_prompt` (for a text without {prompt});
of a score `weight` (1), `zero` (the raw value that becomes 0; the low end of the range), and with `answer = "marker"`
`marker` (the words before the number; NAME) or `pattern` (a regular expression whose one group is the number).
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from unirl.core.errors import RecipeError

from .answers import number_after, number_matching, numbers_of_json

__all__ = ["ScoreRule", "Template", "load", "path_of"]

_FOLDER = Path(__file__).with_name("templates")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
_KEYS = {"version", "answer", "text", "scores", "needs_source", "ignores_prompt"}
_SCORE_KEYS = {"range", "weight", "zero", "marker", "pattern"}


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """One number of the answer."""

    name: str
    low: float
    high: float
    zero: float
    """Raw value that is 0 on the scale of the reward; `high` is 1."""
    weight: float
    marker: str
    pattern: str

    def scaled(self, raw: float) -> float:
        return (raw - self.zero) / (self.high - self.zero)


@dataclass(frozen=True, kw_only=True)
class Template:
    name: str
    version: str
    digest: str
    """SHA-256 of the file."""
    answer: str
    text: str
    rules: tuple[ScoreRule, ...]
    needs_source: bool

    @property
    def metadata_keys(self) -> tuple[str, ...]:
        """Metadata that the text shows."""
        names = dict.fromkeys(_PLACEHOLDER.findall(self.text))
        return tuple(name.removeprefix("metadata.") for name in names if name.startswith("metadata."))

    @property
    def shows_texts(self) -> bool:
        """Whether it compares two completions instead of pictures."""
        return "{first}" in self.text

    def filled(self, prompt: str, metadata: Mapping[str, Any], *, first: str = "", second: str = "") -> str:
        """The text with its placeholders filled in one pass: braces in a prompt stay as they are.

        first, second: the completions. Raises KeyError for metadata that is missing.
        """
        named = {"prompt": prompt, "first": first, "second": second}

        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            return named[name] if name in named else str(metadata[name.removeprefix("metadata.")])

        return _PLACEHOLDER.sub(value, self.text)

    def parse(self, answer: str) -> tuple[float, ...] | None:
        """The raw value of each score; None unless all are there and within their ranges."""
        # A reasoning model may name scores that it then gives up.
        answer = answer.rpartition("</think>")[2]
        if self.answer == "json":
            values = numbers_of_json(answer, [rule.name for rule in self.rules])
        else:
            values = [
                number_matching(answer, rule.pattern) if rule.pattern else number_after(answer, rule.marker, rule.high)
                for rule in self.rules
            ]
        raw = [
            value
            for value, rule in zip(values, self.rules, strict=True)
            if value is not None and rule.low <= value <= rule.high
        ]
        return tuple(raw) if len(raw) == len(self.rules) else None

    def opening(self, rule: ScoreRule) -> str:
        """How an answer begins whose next token is this score."""
        return f'{{"{rule.name}": ' if self.answer == "json" else f"{rule.marker} "

    def value(self, raw: Sequence[float]) -> float:
        """Weighted mean of the scores, each on [0, 1]."""
        pairs = list(zip(self.rules, raw, strict=True))
        return sum(rule.weight * rule.scaled(one) for rule, one in pairs) / sum(rule.weight for rule in self.rules)


def path_of(template: str) -> Path:
    """The file of a template: one of this plugin by its name, or a path that ends in `.toml`."""
    if template.endswith(".toml"):
        return Path(template).expanduser()
    return _FOLDER / f"{template}.toml"


def load(template: str, *, key: str) -> Template:
    """Read and check a template. key: of the setting, for errors. Raises RecipeError for everything that is wrong."""
    path = path_of(template)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in _FOLDER.glob("*.toml")))
        raise RecipeError(f"{key}: there is no file {str(path)!r}. Give a path that ends in .toml, or one of {names}.")
    content = path.read_bytes()
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{key}: {str(path)!r} cannot be read as TOML: {error}.") from error
    where = f"{key}: {path.name}"
    _check_keys(table, _KEYS, where=where)
    answer = _of(table, "answer", str, where=where)
    if answer not in ("json", "marker"):
        raise RecipeError(f"{where}: answer: got {answer!r}, expected json or marker.")
    text = _of(table, "text", str, where=where)
    ignores_prompt = _of(table, "ignores_prompt", bool, where=where, default=False)
    _check_placeholders(text, ignores_prompt=ignores_prompt, where=where)
    scores = _of(table, "scores", dict, where=where)
    if not scores:
        raise RecipeError(f"{where}: scores: got none, expected one table [scores.NAME] or more.")
    rules = tuple(_rule(name, given, answer=answer, where=f"{where}: scores.{name}") for name, given in scores.items())
    return Template(
        name=path.stem,
        version=_of(table, "version", str, where=where),
        digest=hashlib.sha256(content).hexdigest(),
        answer=answer,
        text=text,
        rules=rules,
        needs_source=_of(table, "needs_source", bool, where=where, default=False),
    )


def _check_placeholders(text: str, *, ignores_prompt: bool, where: str) -> None:
    names = _PLACEHOLDER.findall(text)
    for name in names:
        if not re.fullmatch(r"prompt|first|second|metadata\.[\w.-]+", name):
            raise RecipeError(f"{where}: text: got {{{name}}}, expected {{prompt}} or {{metadata.KEY}}.")
    if ("first" in names) != ("second" in names):
        raise RecipeError(f"{where}: text: got one of {{first}} and {{second}}, expected both or none.")
    if ("prompt" in names) == ignores_prompt:
        result = "{prompt} and ignores_prompt = true" if ignores_prompt else "a text without {prompt}"
        raise RecipeError(
            f"{where}: text: got {result}, expected {{prompt}} where the prompt belongs, or ignores_prompt = true for "
            "a judge that is not shown it."
        )


def _rule(name: str, given: object, *, answer: str, where: str) -> ScoreRule:
    if not isinstance(given, dict):
        raise RecipeError(f"{where}: got {given!r}, expected a table with a range.")
    table = cast("dict[str, Any]", given)
    _check_keys(table, _SCORE_KEYS, where=where)
    bounds = table.get("range")
    if bounds is None:
        raise RecipeError(f"{where}: range: missing; state the smallest and largest score, such as range = [1, 5].")
    is_pair = isinstance(bounds, list) and len(cast("list[object]", bounds)) == 2
    if not (is_pair and all(_is_number(bound) for bound in bounds) and bounds[0] < bounds[1]):
        raise RecipeError(f"{where}: range: got {bounds!r}, expected two numbers, the smaller one first.")
    low, high = float(bounds[0]), float(bounds[1])
    zero, weight = table.get("zero", low), table.get("weight", 1.0)
    if not (_is_number(zero) and zero <= low):
        raise RecipeError(f"{where}: zero: got {zero!r}, expected a number of at most {low:g}.")
    if not (_is_number(weight) and weight > 0):
        raise RecipeError(f"{where}: weight: got {weight!r}, expected a number above 0.")
    if answer == "json" and (used := {"marker", "pattern"} & set(table)):
        raise RecipeError(f'{where}: {min(used)}: got one with answer = "json", where the key is the score\'s name.')
    pattern = _of(table, "pattern", str, where=where, default="")
    try:
        groups = re.compile(pattern).groups if pattern else 1
    except re.error as error:
        raise RecipeError(f"{where}: pattern: {error}.") from error
    if groups != 1:
        raise RecipeError(f"{where}: pattern: got {groups} groups, expected one, around the number.")
    marker = _of(table, "marker", str, where=where, default=name).strip()
    return ScoreRule(name=name, low=low, high=high, zero=float(zero), weight=weight, marker=marker, pattern=pattern)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_keys(table: Mapping[str, object], known: set[str], *, where: str) -> None:
    if extra := sorted(set(table) - known):
        raise RecipeError(f"{where}: got the key {extra[0]!r}, expected {', '.join(sorted(known))}.")


def _of(table: Mapping[str, Any], name: str, kind: type[Any], *, where: str, default: object = None) -> Any:
    value = table.get(name, default)
    if not isinstance(value, kind):
        expected = {str: "a text", bool: "true or false", dict: "a table"}[kind]
        result = "nothing" if value is None else repr(value)
        raise RecipeError(f"{where}: {name}: got {result}, expected {expected}.")
    return value
