"""Boxes, symbols and normal forms of TeX."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unirl.rewards.math.tex import last_box, normal_form, plain_tex


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{5} and then \boxed{6}", "6"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\boxed{5} + 1}", r"\boxed{5} + 1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"a set { not closed, \boxed{5}", "5"),
        (r"\boxed{never closed, \boxed{6}", "6"),
        (r"\boxed{5}, then cut off: \boxed{6", "5"),
        (r"\\\boxed{7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        ("", None),
        ("} {", None),
    ],
)
def test_the_last_closed_box_is_found(text: str, box: str | None) -> None:
    assert last_box(text) == box


balanced = st.recursive(
    st.text(st.characters(exclude_characters="{}\\", exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.tuples(inner, inner).map(lambda two: f"{two[0]}{{{two[1]}}}"),
    max_leaves=6,
)


@given(balanced, st.text(max_size=20))
def test_whatever_has_matching_braces_is_found_in_its_box(content: str, before: str) -> None:
    assert last_box(before.replace("\\", "/") + f"\\boxed{{{content}}}") == content.strip()


@given(st.text(st.sampled_from("\\boxed{} $,.%/^12ax½²\n"), max_size=60))
def test_no_text_makes_boxes_or_normal_forms_fail(text: str) -> None:
    """Generated texts are anything at all; and a normal form of a normal form is itself."""
    last_box(text)
    assert isinstance(normal_form(text), str)


def test_boxes_that_are_never_closed_take_one_pass() -> None:
    """300 kB of openings: one pass takes a tenth of a second, a search that starts again at each some minutes."""
    start = time.process_time()
    assert last_box(r"\boxed{" * 40_000) is None
    assert last_box(r"\boxed{" * 20_000 + "5" + "}" * 20_000) == "5"
    assert last_box(r"\boxed{5 " * 20_000 + "}" * 20_000) is not None
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac12", r"\tfrac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        ("1/2", r"\frac{1}{2}"),
        ("-1/2", r"\frac{-1}{2}"),
        ("½", r"\frac{1}{2}"),
        ("x²", "x^{2}"),
        ("√2", r"\sqrt2"),
        ("−3", "-3"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        (".5", "0.50"),
        ("18.00", "18"),
        (r"\$18", "18"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90°"),
        (r"12\text{ cm}", "12"),
        (r"12\,\mathrm{cm}^2", "12"),
        (r"\text{east}", "east"),
        ("x = 5", "5"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("{5}", "5"),
        ("5.", "5"),
        ("１２", "12"),
    ],
)
def test_spellings_of_one_answer_have_one_normal_form(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2/4", "1/2"),
        ("(1,234)", "1234"),
        ("-5", "5"),
        ("{1}+{2}", "1}+{2"),
        ("x^2", "x2"),
        ("1,2", "12"),
        ("0.05", "0.5"),
    ],
)
def test_other_answers_have_other_normal_forms(one: str, other: str) -> None:
    assert normal_form(one) != normal_form(other)


def test_unicode_becomes_tex() -> None:
    assert plain_tex("3½ · x²³ ≤ √(ab)") == r"3\frac{1}{2} \cdot  x^{23} \le  \sqrt{ab}"
