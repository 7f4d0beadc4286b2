"""The examples in the READMEs of all dists run unmodified, and print the output shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "packages/unirl-core": "it trains, so test_shown_runs runs it with smaller settings",
    "plugins/backends/fsdp2": "its own tests look at what it prints",
    "plugins/trackers/report": "it reports on a run, of which there is none here",
    "plugins/trackers/wandb": "it starts the service of wandb",
}
READMES = [*ROOT.glob("packages/*/README.md"), *ROOT.glob("plugins/*/*/README.md")]
EXAMPLES = {
    str(path.parent.relative_to(ROOT)): text.partition("```python\n")[2].partition("```")[0]
    for path in sorted(READMES)
    if "```python\n" in (text := path.read_text(encoding="utf-8"))
}


def test_what_is_tried_elsewhere_has_an_example() -> None:
    assert ELSEWHERE.keys() <= EXAMPLES.keys()


@pytest.mark.parametrize("dist", sorted(EXAMPLES.keys() - ELSEWHERE.keys()))
def test_the_example_of_the_readme_prints_what_it_says(
    dist: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[dist], f"{dist}/README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"^print\(.*\)  # (.*)$", EXAMPLES[dist], flags=re.MULTILINE)
    assert not promised or printed == promised
