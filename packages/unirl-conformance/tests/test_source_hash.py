"""Prose of a source file leaves its hash as it is, code does not."""

from __future__ import annotations

import pytest
from unirl.conformance.source_hash import source_hash

SOURCE = b'''"""A module."""

class Config:
    """What it holds."""

    steps: int = 4
    """How many."""


def scale(x: float = 2.0) -> float:
    """Twice x."""
    # By hand.
    return 2 * x
'''


def of(source: bytes, name: str = "a.py") -> str:
    return source_hash({name: source})


@pytest.mark.parametrize(
    "other",
    [
        SOURCE.replace(b"    # By hand.\n", b""),
        SOURCE.replace(b"Twice x.", b"x, doubled."),
        SOURCE.replace(b'    """Twice x."""\n', b""),
        SOURCE.replace(b'"""A module."""', b"# a comment"),
        SOURCE.replace(b'    """How many."""\n', b""),
        SOURCE.replace(b"return 2 * x", b"return (2\n            * x)"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(other: bytes) -> None:
    assert other != SOURCE
    assert of(other) == of(SOURCE)


@pytest.mark.parametrize(
    "other",
    [
        SOURCE.replace(b"2 * x", b"3 * x"),
        SOURCE.replace(b"x: float = 2.0", b"x: float = 2"),
        SOURCE.replace(b"x: float = 2.0", b"x: float"),
        SOURCE.replace(b"steps: int", b"steps: float"),
        SOURCE.replace(b"def scale", b"def scaled"),
        SOURCE.replace(b"return 2 * x", b"return '2 * x'"),
        SOURCE.replace(b"return 2 * x", b"return"),
    ],
)
def test_code_counts(other: bytes) -> None:
    assert other != SOURCE
    assert of(other) != of(SOURCE)


def test_names_count_and_the_order_of_files_does_not() -> None:
    assert of(SOURCE, "b.py") != of(SOURCE)
    assert source_hash({"a.py": b"x = 1", "b.py": b"y"}) == source_hash({"b.py": b"y", "a.py": b"x = 1"})
    assert source_hash({"a.py": b"x = 1", "b.py": b"y"}) != source_hash({"a.py": b"y", "b.py": b"x = 1"})


def test_files_that_are_not_python_count_by_their_bytes() -> None:
    assert of(b"steps: 1", "a.yaml") != of(b"steps: 1  # few", "a.yaml")
    # What follows a name cannot be taken for another file.
    assert source_hash({"a": b"x", "b": b"y"}) != source_hash({"a": b"xb 1\ny"})


def test_a_python_file_that_cannot_be_parsed_is_an_error_with_its_name() -> None:
    with pytest.raises(SyntaxError) as caught:
        of(b"def", "broken.py")
    assert caught.value.filename == "broken.py"
