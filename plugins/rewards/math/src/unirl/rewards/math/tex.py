"""TeX of answers: the last box of a text, symbols of Unicode, and a normal form in which equal answers look equal."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

__all__ = ["last_box", "normal_form", "plain_tex", "split_percent"]

_BOX_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<brace>[{}])", re.DOTALL)


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed{...} or \fbox{...} of a text, boxes around it taken off; None if none is closed.

    Braces are matched; `\{` and `\}` do not count. A box that is never closed does not count, nor does it hide others.
    One pass over the text, whatever is in it.
    """
    result: list[_Box] = []
    still_open: list[tuple[bool, int, int]] = []
    for token in _BOX_TOKEN.finditer(text):
        if token["box"] is not None or token["brace"] == "{":
            still_open.append((token["box"] is not None, token.start(), token.end()))
        elif token["brace"] == "}" and still_open:
            is_box, start, inside = still_open.pop()
            if not is_box:
                continue
            box = _Box(start, token.end(), (inside, token.start()))
            while result and result[-1].start > start:
                inner = result.pop()
                # \boxed{\boxed{5}} is 5, while \boxed{\boxed{5} + 1} stays.
                if not text[inside : inner.start].strip() and not text[inner.end : token.start()].strip():
                    box = _Box(start, token.end(), inner.content)
            result.append(box)
    return text[slice(*result[-1].content)].strip() if result else None


class _Box(NamedTuple):
    """A closed box that no other closed box contains, by positions in the text."""

    start: int
    end: int
    content: tuple[int, int]


_SYMBOLS = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "±": r"\pm ", "°": r"^\circ "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset "},
    }
)
_ROOT = re.compile(r"√\s*([0-9]+|[A-Za-z]|\([^()]*\)|\{[^{}]*\})")


def plain_tex(text: str) -> str:
    r"""The text with symbols of Unicode as TeX: `½` as \frac{1}{2}, `x²` as x^{2}, `√2` as \sqrt{2}, `−` as -."""
    if text.isascii():
        return text
    pieces: list[str] = []
    level = ""
    for char in text:
        kind, _, codes = unicodedata.decomposition(char).partition(" ")
        sign = {"<super>": "^", "<sub>": "_"}.get(kind, "")
        if level and sign != level:
            pieces.append("}")
        if sign and sign != level:
            pieces.append(sign + "{")
        level = sign
        if not kind.startswith("<"):
            pieces.append(char)
            continue
        plain = "".join(chr(int(code, 16)) for code in codes.split())
        top, slash, bottom = plain.partition("\N{FRACTION SLASH}")
        pieces.append(f"\\frac{{{top}}}{{{bottom}}}" if slash and bottom else plain)
    if level:
        pieces.append("}")
    text = "".join(pieces).translate(_SYMBOLS)
    return _ROOT.sub(lambda found: f"\\sqrt{{{found[1].strip('(){}')}}}", text)


def split_percent(tex: str) -> tuple[str, bool]:
    """The answer without a percent sign at its end, and whether there was one."""
    bare = re.sub(r"\s*\\?%$", "", tex)
    return bare, bare != tex


_IGNORED = re.compile(
    r"\\(?:left|right|displaystyle|degree)(?![A-Za-z])|\\[!,;: ]|\\?[%$]|~"
    r"|\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}"
)
_WORDS = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*"
_UNIT = re.compile(rf"(?<=[\w}})])\s*{_WORDS}\{{[^{{}}]*\}}(?:\^\{{?[23]\}}?)?$")
_GROUPED = re.compile(r"([+-]?[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+)(\.[0-9]+)?")
_DECIMAL = re.compile(r"([+-]?)0*([0-9]+)(?:\.([0-9]*?)0*)?")


def normal_form(tex: str) -> str:
    r"""A spelling that is the same for answers that differ in spelling alone.

    Without white space, sizes (\left), spacing (\!), currency, percent and degree signs, a unit in \text{} at the end,
    one variable with `=` in front, a full stop; \dfrac and \tfrac are \frac, `a/b` of integers and \frac12 are
    \frac{a}{b}, \text{word} is the word, 1,234 is 1234, .50 is 0.5. Nothing is computed: 2/4 is not 1/2.
    """
    tex = plain_tex(tex).strip()
    tex = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", tex)
    tex = _IGNORED.sub("", tex).strip().rstrip(".").strip()
    tex = _UNIT.sub("", tex)
    tex = re.sub(rf"{_WORDS}\{{([^{{}}]*)\}}", r"\1", tex)
    tex = re.sub(r"\s+", "", tex)
    tex = re.sub(r"^[A-Za-z](?:_\{?\w+\}?)?=(?=.)", "", tex)
    tex = re.sub(r"\\frac(?:([0-9])|(?=\{))", lambda f: f"\\frac{{{f[1]}}}" if f[1] else f[0], tex)
    tex = re.sub(r"(\\frac\{[^{}]*\})([0-9A-Za-z])", r"\1{\2}", tex)
    tex = re.sub(r"\\sqrt([0-9A-Za-z])", r"\\sqrt{\1}", tex)
    tex = re.sub(r"^([+-]?)([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}", tex)
    tex = re.sub(r"^\\frac\{-([^{}]*)\}", r"-\\frac{\1}", tex)
    while tex.startswith("{") and tex.endswith("}") and _closes_at_end(tex):
        tex = tex[1:-1]
    return _number(tex)


def _number(tex: str) -> str:
    """A plain decimal without grouping, plus sign and needless zeros; anything else with zeros before bare points."""
    grouped = _GROUPED.fullmatch(tex)
    if grouped:
        tex = grouped[1].replace("{,}", "").replace(",", "") + (grouped[2] or "")
    tex = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", tex)
    decimal = _DECIMAL.fullmatch(tex)
    if not decimal:
        return tex
    value = decimal[2] + (f".{decimal[3]}" if decimal[3] else "")
    return ("-" if decimal[1] == "-" and value != "0" else "") + value


def _closes_at_end(tex: str) -> bool:
    """Whether the brace that opens first closes last."""
    depth = 0
    for token in re.finditer(r"\\.|([{}])", tex):
        depth += {"{": 1, "}": -1}.get(token[1] or "", 0)
        if depth == 0 and token[1]:
            return token.end() == len(tex)
    return False
