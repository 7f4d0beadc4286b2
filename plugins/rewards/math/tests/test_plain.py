"""Answers that are found and compared as text: final numbers, choices, boxes, the whole text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unirl.rewards.math.plain import boxed, choice, exact, final_number, gsm8k


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 9", 9),
        ("#### 1,234", 1234),
        ("#### $1,234.50", Fraction("1234.5")),
        ("####18", 18),
        ("#### 18.", 18),
        ("#### 18 dollars", 18),
        ("#### **18**", 18),
        ("#### -5", -5),
        ("#### 50%", 50),
        ("#### 3/4", Fraction(3, 4)),
        ("#### 70,000\n\nI hope it is correct: 2024.", 70000),
        ("#### Step 2: add 3 and 4\nThat is 7.", 7),
        ("#### 2. Add up\nThat is 7.", 7),
        ("The answer is 18.", 18),
        ("The answer is $18.00.", 18),
        ("It costs 2 and -$3", -3),
        ("It costs $-3", -3),
        ("5-3 = 2, and 10-3", 3),
        ("from 3 to (1,2)", 2),
        ("12{,}000", 12000),
        ("answer: .5", Fraction(1, 2)),
        ("−7 degrees", -7),
        ("１２ people", 12),
        ("version 3.14.15", Fraction("3.14")),
        ("model B2", None),
        ("####", None),
        ("", None),
        ("no number", None),
        ("1/0", None),
        ("9" * 5000, None),
    ],
)
def test_the_final_number_is_found(text: str, number: Fraction | int | None) -> None:
    assert final_number(text) == number


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{:,}", "{}", "{}.", "{:,}.00", "**{}**", "{:,} apples", "{} %"])
)
def test_every_integer_is_read_back_from_every_spelling(number: int, spelling: str) -> None:
    assert final_number("The result is #### " + spelling.format(number)) == number
    assert final_number("First 12, so it is " + spelling.format(number)) == number


@given(st.text(max_size=80))
def test_no_text_makes_a_method_fail(text: str) -> None:
    for grade in (gsm8k, boxed, exact, choice("ABCDE")):
        for key, result in ((text, "A 5"), ("A", text), ("5", text)):
            assert grade(key, result).outcome in ("right", "wrong", "unparsed", "bad-key")


@pytest.mark.parametrize(
    ("key", "text", "outcome"),
    [
        ("18", "#### 18.00", "right"),
        ("1,200", "so 1200", "right"),
        ("She pays 3 x 6 dollars.\n#### 18", "$18", "right"),
        ("18", "#### 19\n18", "wrong"),
        ("18", "", "unparsed"),
        ("none", "18", "bad-key"),
    ],
)
def test_gsm8k_compares_numbers(key: str, text: str, outcome: str) -> None:
    assert gsm8k(key, text).outcome == outcome


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("b)", "B"),
        ("B. Paris", "B"),
        ("The answer is B.", "B"),
        ("The answer is (b)", "B"),
        ("**Answer: B**", "B"),
        ("Answer: **(B)**", "B"),
        ("The correct option is B because C is too large.", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{\textbf{(B)}\ 5}", "B"),
        (r"The answer is A. No: \boxed{B}", "B"),
        ("Answer: A.\nWait, answer: B.", "B"),
        ("It is not (A) and not (C), which leaves (B)", "B"),
        ("Reasoning.\nB", "B"),
        ("The answer is a square", None),
        ("A square has four corners", None),
        (r"\boxed{a+b}", None),
        ("The answer is Z.", None),
        ("", None),
    ],
)
def test_the_chosen_letter_is_found(text: str, letter: str | None) -> None:
    assert choice("ABCDE")("B", text).outcome == ("unparsed" if letter is None else "right")
    assert choice("ABCDE")("C", text).outcome == ("unparsed" if letter is None else "wrong")


def test_a_key_that_is_no_choice_is_the_keys_fault() -> None:
    assert choice("ABCD")("E", "E").outcome == "bad-key"
    assert choice("ABCD")("(d)", "D").outcome == "right"


@pytest.mark.parametrize(
    ("key", "text", "outcome"),
    [
        (r"\frac{1}{2}", r"so \boxed{1/2}", "right"),
        (r"\boxed{1{,}000}", r"\boxed{1000}", "right"),
        ("5", "5", "unparsed"),
        ("5", r"\boxed{}", "unparsed"),
        ("5", r"\boxed{6}", "wrong"),
        (" ", r"\boxed{6}", "bad-key"),
    ],
)
def test_boxes_are_compared_in_normal_form(key: str, text: str, outcome: str) -> None:
    assert boxed(key, text).outcome == outcome


@pytest.mark.parametrize(
    ("key", "text", "outcome"),
    [
        ("7", " 7\n", "right"),
        ("7", "7.0", "wrong"),
        ("7", "it is 7", "wrong"),
        ("é", "é", "right"),
        ("7", "  ", "unparsed"),
        ("", "7", "bad-key"),
    ],
)
def test_exact_takes_the_whole_text(key: str, text: str, outcome: str) -> None:
    assert exact(key, text).outcome == outcome
