"""The page about votes does what it says: samples, votes by a rule, Diffusion-DPO on them, and votes on the result."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT
from small_runs import events
from unirl.core.cli import main
from voters import VoteClient, by_reward

# Four minutes each on an idle machine.
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]

PAGE = ROOT / "docs/how-to/vote.md"


def vote(words: list[str]) -> str:
    """What `unirl vote` prints when all pairs have the vote of somebody who goes by the reward."""
    command = [Path(sys.executable).with_name("unirl"), "vote", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        url = next(word for word in process.stderr.readline().split() if word.startswith("http://"))
        VoteClient(url).vote_on_all(by_reward(*(Path(word) for word in words if word.startswith("runs/"))))
        process.send_signal(signal.SIGINT)
        result = process.stdout.read()
        process.stderr.read()
    assert process.returncode == 0
    return result


def test_diffusion_dpo_on_votes_by_a_rule_raises_what_the_rule_looks_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands of the page, in its order, with three seeds. Each raises the held-out mean. 64 votes are too few to
    tell a gain of this size, so the win rate is that of all votes together."""
    rates: list[float] = []
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        rates.append(win_rate(seed, tmp_path / str(seed), monkeypatch=monkeypatch, capsys=capsys))
    assert sum(rates) / len(rates) > 50, rates


def win_rate(seed: int, folder: Path, *, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> float:
    """The printed win rate of the trained model, in percent, of equally many votes with each seed."""
    monkeypatch.chdir(folder)
    printed = ""
    for command in re.findall(r"^    (unirl [^\n]*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        words = shlex.split(command)[1:]
        if words[0] == "vote" and "--result" not in words:
            printed = vote(words[1:])
            continue
        with pytest.raises(SystemExit) as caught:
            main([*words, *([f"run.seed={seed}"] if words[0] == "train" else [])])
        output = capsys.readouterr()
        assert caught.value.code == 0, f"{command}: {output.err}"
        if words[0] == "vote":
            assert output.out == printed
    rows = [json.loads(line) for line in (folder / "votes-pairs.jsonl").read_text().splitlines()]
    assert len(rows) >= 50
    before, after = (
        events(folder / "runs" / name, "evaluated")[-1]["metrics"]["score_mean"] for name in ("before", "after")
    )
    assert after > before
    match = re.search(r"B wins ([\d.]+)%", printed)
    assert match is not None, printed
    return float(match[1])
