"""GenEval 2: the probability that a VLM answers each question about an image as expected (Soft-TIFA).

Source: GenEval 2, arXiv 2512.16853; its published evaluation for the wording, the spellings and the means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from unirl.core.errors import RewardFailed
from unirl.core.names import did_you_mean
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .answerer import answerer
from .config import Geneval2Config
from .question import Question, pictures_of

__all__ = ["SKILLS", "Atom", "Geneval2Reward", "atoms_of", "build", "spellings"]

SKILLS = ("object", "count", "attribute", "position", "verb")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Atom(NamedTuple):
    question: str
    answer: str
    skill: str
    """One of `SKILLS`, or empty where the metadata do not say."""


def build(config: Geneval2Config, *, device: Any) -> Geneval2Reward:
    """Raises RecipeError for settings or a model that cannot be used."""
    return Geneval2Reward(config, device=device)


class Geneval2Reward:
    def __init__(self, config: Geneval2Config, *, device: Any) -> None:
        check_config(config, key="reward.geneval2")
        self._config = config
        self._model = answerer(config, device=device)

    def score(self, samples: ScoreInput) -> Scores:
        """The component `config.score`. Components, each [N] in [0, 1]: `geometric` and `arithmetic`, means of the
        probabilities; `strict`, 1 if every most probable answer is the expected one; and of each of `SKILLS` the mean
        probability, 1 where the prompt has none.

        Raises RewardFailed, naming the sample, for metadata that `atoms_of` refuses.
        """
        pictures = pictures_of(samples, reward="geneval2", num_frames=1)
        atoms: list[list[Atom]] = []
        for row, metadata in enumerate(samples.metadata):
            try:
                atoms.append(atoms_of(metadata))
            except ValueError as error:
                raise RewardFailed(
                    f"reward.geneval2: metadata of sample {samples.sample_ids[row]!r} (prompt "
                    f"{samples.inputs.prompts[row][:80]!r}): {error}"
                ) from error
        asked = [
            Question(text=f"{atom.question} Answer in one word.", images=shown)
            for shown, row in zip(pictures, atoms, strict=True)
            for atom in row
        ]
        with torch.no_grad():
            answers = iter(self._model.stated(asked, [spellings(atom.answer) for row in atoms for atom in row]))
        rows = [self._judged(row, [next(answers) for _ in row]) for row in atoms]
        parts = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        return Scores(values=parts[self._config.score].clone(), parts=parts)

    def close(self) -> None:
        self._model.close()

    def _judged(self, atoms: Sequence[Atom], answers: Sequence[tuple[float, str]]) -> dict[str, float]:
        # Sums over tokens pass 1 by their rounding.
        shares = [min(share, 1.0) for share, _ in answers]
        by_skill = {
            skill: [share for atom, share in zip(atoms, shares, strict=True) if atom.skill == skill] for skill in SKILLS
        }
        is_right = [top in spellings(atom.answer) for atom, (_, top) in zip(atoms, answers, strict=True)]
        return {
            "geometric": math.exp(sum(map(math.log, shares)) / len(shares)) if all(shares) else 0.0,
            "arithmetic": sum(shares) / len(shares),
            "strict": float(all(is_right)),
            **{skill: sum(of) / len(of) if of else 1.0 for skill, of in by_skill.items()},
        }


def spellings(answer: str) -> frozenset[str]:
    """How an answer may be written: in lower case or with a capital, after a space or not, a number up to ten in digits
    as well."""
    word = answer.lower()
    words = [word, word.capitalize(), *([str(_NUMBERS.index(word) + 1)] if word in _NUMBERS else [])]
    return frozenset([*words, *(f" {one}" for one in words)])


def atoms_of(metadata: Mapping[str, Any]) -> list[Atom]:
    """The questions of a prompt: `vqa_list`, pairs of question and answer, and `skills`, what each is about, as in
    GenEval 2's data. Without `skills` the components of skills are 1.

    Raises ValueError, with the path of the value first, for metadata of another form.
    """
    pairs = cast("object", metadata.get("vqa_list"))
    if not isinstance(pairs, list | tuple) or not pairs:
        raise ValueError(f"vqa_list: got {pairs!r}, expected a list of one pair [question, answer] or more.")
    skills = cast("object", metadata.get("skills", [""] * len(pairs)))
    if not isinstance(skills, list | tuple) or len(skills) != len(pairs):
        raise ValueError(f"skills: got {skills!r}, expected a list with one entry for each of {len(pairs)} questions.")
    atoms: list[Atom] = []
    for index, (pair, skill) in enumerate(zip(cast("list[Any]", pairs), cast("list[Any]", skills), strict=True)):
        is_pair = isinstance(pair, list | tuple) and len(cast("list[Any]", pair)) == 2
        if not (is_pair and all(isinstance(text, str) and text.strip() for text in pair)):
            raise ValueError(f"vqa_list[{index}]: got {pair!r}, expected a pair [question, answer] of texts.")
        question, answer = (text.strip() for text in cast("list[str]", pair))
        if len(answer.split()) != 1:
            raise ValueError(f"vqa_list[{index}][1]: got {answer!r}, expected one word, such as Yes or four.")
        if "skills" in metadata and skill not in SKILLS:
            expected = f"expected one of {', '.join(SKILLS)}{did_you_mean(str(skill), SKILLS)}"
            raise ValueError(f"skills[{index}]: got {skill!r}, {expected}.")
        atoms.append(Atom(question, answer, skill))
    return atoms
