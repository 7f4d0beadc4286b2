"""Answer extraction and comparison without a parser: boxed, final number, choice, exact."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction

from .tex import last_box, normal_form, plain_tex
from .verdict import Verdict

__all__ = ["PlainGrader", "boxed", "choice", "exact", "final_number", "gsm8k"]

Grade = Callable[[str, str], Verdict]
"""(reference answer, completion) -> verdict."""


class PlainGrader:
    """Grades one by one, in this thread."""

    def __init__(self, grade: Grade) -> None:
        self._grade = grade

    def grade(self, pairs: list[tuple[str, str]]) -> list[Verdict]:
        return [self._grade(key, answer) for key, answer in pairs]

    def close(self) -> None:
        pass


def exact(key: str, text: str) -> Verdict:
    """The whole completion, stripped, is the answer; an empty completion has no answer."""
    if not key.strip():
        return Verdict("bad-key", "is empty")
    if not text.strip():
        return Verdict("unparsed")
    return Verdict.of(text.strip() == key.strip())


def boxed(key: str, text: str) -> Verdict:
    r"""The last \boxed{...} of the text is the answer, both in normal form; the answer may be boxed itself."""
    inside_key = last_box(key)
    expected = normal_form(key if inside_key is None else inside_key)
    if not expected:
        return Verdict("bad-key", "is empty in normal form")
    result = last_box(text)
    if result is None or not normal_form(result):
        return Verdict("unparsed")
    return Verdict.of(normal_form(result) == expected)


_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_VALUE = (
    # A minus after a digit, a letter or a bracket subtracts. Currency may come before or after the sign.
    r"(?:(?<![\w)\]])(?P<sign>[-+]))?(?:\\?[$€£¥₹]\s*(?P<inner>[-+])?)?"
    rf"(?<![\w.])(?P<value>{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)(?:\s*/\s*(?P<below>[0-9]+)(?![0-9/]))?"
)
_NUMBER = re.compile(_VALUE)
_MARKED = re.compile(rf"####[ \t*]*{_VALUE}(?P<rest>[^\n]*)")
_UNIT_ALONE = re.compile(r"\s*\\?%?[A-Za-z°^²³/ ]{0,40}[.*$) \t\r]*")
LONGEST = 100
"""Characters that a number may have: one with more is not an answer to a word problem."""


def gsm8k(key: str, text: str) -> Verdict:
    """The final number of the text equals that of the answer, as numbers: 1,200 = $1200.00, and 50% = 50."""
    expected = final_number(key)
    if expected is None:
        return Verdict("bad-key", "has no number")
    result = final_number(text)
    return Verdict("unparsed") if result is None else Verdict.of(result == expected)


def final_number(text: str) -> Fraction | None:
    """The number after the last `####` with nothing but a unit behind it, else the last number; None if there is none.

    Commas group thousands; currency signs, percent signs, units and a full stop are not part of a number. `3/4` is one.
    A heading of Markdown, `#### 2. Add up`, is not an answer.
    """
    text = plain_tex(text).replace("{,}", ",")
    marked = [result for result in _MARKED.finditer(text) if _UNIT_ALONE.fullmatch(result["rest"])]
    result = (marked or [None, *_NUMBER.finditer(text)])[-1]
    if result is None:
        return None
    value, below = result["value"].replace(",", ""), result["below"] or "1"
    if len(value) > LONGEST or len(below) > LONGEST or not int(below):
        return None
    negative = "-" in ((result["sign"] or "") + (result["inner"] or ""))
    return (-1 if negative else 1) * Fraction(value) / int(below)


_LETTER = (
    # Bounded, so that no text takes long: loops over white space are side by side here and below.
    r"(?:\$|\*\*|\\(?:text|mathrm)\w{0,2}\s{0,3}\{|[(\[]|\s){0,8}(?P<letter>[A-Za-z])"
    # A letter that stands alone, rather than the article before a word.
    r"(?:\s*[)\].:,}$*]|\s*$|\s+(?:because|since)\b|(?-i:(?<=[B-HJ-Z]))\s)"
)
_STATED = re.compile(
    r"\b(?:answer|option|choice)\b[\s:*]{0,8}(?:(?:is|would be|should be)\b)?[\s:]{0,8}(?:option\b|choice\b)?"
    + _LETTER,
    re.IGNORECASE | re.MULTILINE,
)
_ALONE = re.compile(_LETTER)
_BRACKETED = re.compile(r"\((?P<letter>[A-Z])\)")


def choice(letters: str) -> Grade:
    """The letter of a multiple choice; `letters` are those of its options.

    Found, in this order: in the last box; after the last "answer is", "answer:", "option" or "choice"; at the start of
    the last line; the last one in round brackets. Small letters count where they stand alone.
    """
    known = letters.upper()

    def letter_of(text: str) -> str | None:
        text = text.strip()
        box = last_box(text)
        if box is not None:
            return _last_known([_ALONE.match(box)], known)
        last_line = text.rpartition("\n")[2]
        tries = (_STATED.finditer(text), [_ALONE.match(last_line)], _BRACKETED.finditer(text))
        return next((letter for matches in tries if (letter := _last_known(matches, known))), None)

    def grade(key: str, text: str) -> Verdict:
        expected = key.strip().strip("()[].").upper()
        if len(expected) != 1 or expected not in known:
            return Verdict("bad-key", f"is not one of the letters {', '.join(known)}")
        result = letter_of(text)
        return Verdict("unparsed") if result is None else Verdict.of(result == expected)

    return grade


def _last_known(matches: Iterable[re.Match[str] | None], known: str) -> str | None:
    letters = [match["letter"].upper() for match in matches if match]
    return next((letter for letter in reversed(letters) if letter in known), None)
