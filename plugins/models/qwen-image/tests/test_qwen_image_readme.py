from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_of_the_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    (promised,) = re.findall(r"^print\(.*\)  # (.*)$", example, flags=re.MULTILINE)
    assert capsys.readouterr().out.strip() == promised
