"""The server and the command of `unirl vote`: what they take, from whom, and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from interruptible import interruptible
from pages import ROOT
from PIL import Image
from unirl.core.cli import main
from unirl.trackers.report.history import read_history
from unirl.trackers.report.vote.command import vote
from unirl.trackers.report.vote.pairs import held_out_pairs
from unirl.trackers.report.vote.server import PAGE, VoteServer, start_server
from unirl.trackers.report.vote.session import VotingSession
from unirl.trackers.report.vote.votes_file import VotedRun, opened, read_votes
from view_runs import END, start, step, with_images, write
from voters import VoteClient

PAGES = (ROOT / "docs/how-to/vote.md", ROOT / "plugins/trackers/report/README.md")
NAMES = ("before-training", "after-training")


def a_run(folder: Path, key: str, *, first: int) -> Path:
    resolved = {"run": {"seed": 7}, "model": {"use": "sd3"}}
    write(folder, start(name=folder.name, evaluation={"seed": 3}, resolved=resolved), step(1, loss=0.5), END)
    rows = [
        {"sample": f"r0/{prompt}/{n}", "prompt": prompt, "reward": 0.71875, "colour": first + 10 * at + n}
        for at, prompt in enumerate(("a <b>ring</b>", "a disc"))
        for n in range(3)
    ]
    return with_images(folder, key, 1, rows)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    one, other = (a_run(tmp_path / name, "eval", first=1000 * at) for at, name in enumerate(NAMES))
    return one, other


@pytest.fixture
def server(runs: tuple[Path, Path], tmp_path: Path) -> Iterator[VoteServer]:
    pairs = held_out_pairs(*map(read_history, runs), seed=0)
    voted = [VotedRun(folder=folder, began=float(number)) for number, folder in enumerate(runs)]
    with opened(tmp_path / "votes.jsonl", voted, pairs, seed=0) as file, serving(VotingSession(pairs, file)) as result:
        yield result


@contextmanager
def serving(session: VotingSession) -> Iterator[VoteServer]:
    with start_server(session, host="127.0.0.1", port=0) as result:
        thread = threading.Thread(target=result.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield result
        result.shutdown()
        thread.join()


@pytest.fixture
def client(server: VoteServer) -> VoteClient:
    return VoteClient(server.url)


def failed(words: Sequence[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    """The one error of a command."""
    with pytest.raises(SystemExit) as caught:
        main(["vote", *map(str, words)])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and "Traceback" not in message
    return message


def test_all_pairs_are_voted_on_over_http(client: VoteClient, tmp_path: Path) -> None:
    state = client.vote_on_all(lambda left, right: "left")
    assert (state["done"], state["total"]) == (6, 6) and state["result"][0].endswith("left preferred in 6 of 6")
    assert len(read_votes(tmp_path / "votes.jsonl").cast) == 6
    assert "pair" in json.loads(client.request("/api/undo", {"done": 6})[2])
    assert client.state()["done"] == 5 and len(read_votes(tmp_path / "votes.jsonl").cast) == 5


@pytest.mark.parametrize(("suffix", "kind"), [(".png", "image/png"), (".webp", "image/webp")])
def test_a_picture_is_served_as_what_it_is(runs: tuple[Path, Path], tmp_path: Path, suffix: str, kind: str) -> None:
    for file in (path for folder in runs for path in (folder / "media").rglob("eval-*.png") if suffix == ".webp"):
        with Image.open(file) as opened_file:
            opened_file.convert("RGB").save(file.with_suffix(suffix), lossless=True)
    pairs = held_out_pairs(*map(read_history, runs), seed=0)
    voted = [VotedRun(folder=folder, began=float(number)) for number, folder in enumerate(runs)]
    with opened(tmp_path / "votes.jsonl", voted, pairs, seed=0) as file, serving(VotingSession(pairs, file)) as server:
        client = VoteClient(server.url)
        status, headers, _ = client.request(f"/pictures/{client.state()['pair']}/left")
    assert (status, headers["Content-Type"]) == (200, kind)


def test_nothing_that_is_served_names_a_run_or_its_reward(client: VoteClient, runs: tuple[Path, Path]) -> None:
    """The pages, all states, and the headers and contents of the pictures, until the last vote."""
    served = [client.request(f"/{name}") for name in ("", *PAGE)]
    while "pair" in (state := client.state()):
        served += [client.request("/api/vote")]
        served += [client.request(f"/pictures/{state['pair']}/{side}") for side in ("left", "right")]
        last = client.vote(state["pair"], "tie")
    assert all(status == 200 for status, _, _ in served) and len(served) == len(PAGE) + 1 + 3 * 6
    for _, headers, content in served:
        told = (json.dumps(headers).encode() + content).lower()
        assert not [word for word in (*NAMES, "train-", "eval-", "0.71875", "step-0") if word.encode() in told]
    for number in range(6):
        kinds = {tuple(client.request(f"/pictures/{number}/{side}")[1].items()) for side in ("left", "right")}
        # Apart from the date, whose seconds may differ, and the length of the picture.
        assert len({tuple(name for name, _ in kind) for kind in kinds}) == 1
    assert all(name in str(last["result"]) for name in NAMES)


def test_the_page_loads_nothing_from_elsewhere(client: VoteClient) -> None:
    for name in ("", *PAGE):
        status, headers, content = client.request(f"/{name}")
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert status == 200 and "://" not in text and "innerHTML" not in text and "@import" not in text
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy


VOTE = {"pair": 0, "choice": "left"}


@pytest.mark.parametrize(
    ("sent", "headers", "status"),
    [
        (VOTE, {"Host": "evil.example"}, 403),
        (VOTE, {"Origin": "http://evil.example"}, 403),
        (VOTE, {"Origin": "null"}, 403),
        (VOTE, {"Origin": "http://["}, 403),
        (VOTE, {"Origin": ""}, 403),
        # What a form or a page elsewhere can send without being asked.
        (VOTE, {"Content-Type": "text/plain"}, 415),
        (VOTE, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b" " * 5000, {}, 413),
        (VOTE, {"Content-Length": "x"}, 413),
        (VOTE, {"Content-Length": "-1"}, 413),
        (b"{", {}, 400),
        (b"[" * 4000, {}, 400),
        (b"\xff", {}, 400),
        ([1], {}, 400),
        ({"pair": "0", "choice": "left"}, {}, 404),
        ({"pair": 0, "choice": "both"}, {}, 404),
        ({"pair": 0}, {}, 404),
        ({"done": 0}, {}, 404),
        ({"pair": 1, "choice": "left"}, {}, 409),
        ({"pair": -1, "choice": "left"}, {}, 409),
        ({"pair": 10**400, "choice": "left"}, {}, 409),
    ],
)
def test_what_is_no_vote_of_this_page_changes_nothing(
    client: VoteClient, tmp_path: Path, sent: Any, headers: dict[str, str], status: int
) -> None:
    before = (tmp_path / "votes.jsonl").read_bytes()
    assert client.request("/api/vote", sent, **headers)[0] == status
    assert (tmp_path / "votes.jsonl").read_bytes() == before
    assert client.state()["done"] == 0


def test_votes_of_the_own_page_count_and_a_second_one_does_not(client: VoteClient, server: VoteServer) -> None:
    origin = {"Origin": server.url.rstrip("/"), "Host": urlsplit(server.url).netloc}
    assert client.request("/api/vote", VOTE, **origin)[0] == 200
    status, _, content = client.request("/api/vote", VOTE)
    assert status == 409 and json.loads(content)["pair"] == 1
    assert client.request("/api/undo", {"done": 2})[0] == 409
    assert client.request("/api/undo", {"done": 1})[0] == 200
    assert client.request("/api/undo", {"done": 0})[0] == 409


def test_a_page_of_an_earlier_session_neither_votes_nor_undoes(client: VoteClient, tmp_path: Path) -> None:
    client.vote(0, "left")
    before = (tmp_path / "votes.jsonl").read_bytes()
    for path, sent in (("/api/vote", {"pair": 1, "choice": "left"}), ("/api/undo", {"done": 1})):
        for token in ("0" * 32, None):
            status, _, content = client.request(path, {**sent, "session": token})
            assert status == 410 and "Reload the page to continue." in json.loads(content)["problem"]
    assert (tmp_path / "votes.jsonl").read_bytes() == before and client.state()["done"] == 1


@pytest.mark.parametrize(
    "path",
    [
        *("/pictures/0/up", "/pictures/99/left", "/pictures/0/0", "/pictures/-1/left", "/pictures/0/%2e%2e%2fleft"),
        *("/pictures/0/left/x", "/../vote.js", "/votes.jsonl", "/api", "/api/undo", "/pictures/%C2%B2/left"),
    ],
)
def test_other_addresses_have_nothing(client: VoteClient, path: str) -> None:
    assert client.request(path)[0] == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_not_there(client: VoteClient, method: str) -> None:
    assert client.request("/api/vote", method=method)[0] == 501


def test_an_image_that_is_gone_or_another_one_is_not_voted_on(
    client: VoteClient, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    client.vote(0, "left")
    before = (tmp_path / "votes.jsonl").read_bytes()
    for file in runs[0].rglob("*.png"):
        Image.new("RGB", (4, 4), "white").save(file)
    status, _, content = client.request("/api/vote", {"pair": 1, "choice": "left"})
    assert status == 410 and "the run has written another image" in json.loads(content)["problem"]
    shutil.rmtree(runs[0])
    status, _, content = client.request("/api/vote", {"pair": 1, "choice": "left"})
    assert status == 410 and "Was the run moved or deleted?" in json.loads(content)["problem"]
    statuses = [client.request(f"/pictures/1/{side}") for side in ("left", "right")]
    assert sorted(status for status, _, _ in statuses) == [200, 410]
    assert not any(name.encode() in content for name in NAMES for _, _, content in statuses)
    assert (tmp_path / "votes.jsonl").read_bytes() == before and client.state()["done"] == 1


def test_a_votes_file_that_is_gone_takes_no_vote(client: VoteClient, tmp_path: Path) -> None:
    (tmp_path / "votes.jsonl").rename(tmp_path / "elsewhere.jsonl")
    status, _, content = client.request("/api/vote", VOTE)
    assert status == 410 and "votes.jsonl" in json.loads(content)["problem"]
    assert not (tmp_path / "votes.jsonl").exists() and client.state()["done"] == 0


def test_a_run_that_grows_while_voting_asks_what_it_had(client: VoteClient, runs: tuple[Path, Path]) -> None:
    with_images(runs[0], "eval", 2, [{"sample": "r0/a disc/0", "prompt": "a disc", "colour": 7}])
    assert client.vote_on_all(lambda left, right: "tie")["done"] == 6


def test_commands_that_cannot_be_are_one_error(
    runs: tuple[Path, Path], server: VoteServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    votes = tmp_path / "more.jsonl"
    port = urlsplit(server.url).port
    for words, says in (
        ((), "give one run, two runs, or --result FILE"),
        ((*runs, runs[0]), "give one run, two runs, or --result FILE"),
        ((runs[0], "--result", votes), "give one run, two runs, or --result FILE"),
        (("--result", votes), f"{votes}: no such file of votes"),
        ((tmp_path / "none",), "it has no events.jsonl"),
        ((runs[0], tmp_path / "." / NAMES[0]), "got the same run twice"),
        ((*runs, "--votes", tmp_path / "votes.jsonl"), "another `unirl vote` is writing to it"),
        ((runs[0], "--votes", votes), "it saved no training images"),
        ((*runs, "--votes", votes, "--port", port), f"--port {port} on 127.0.0.1: Address already in use"),
        ((*runs, "--votes", votes, "--host", "192.0.2.1", "--port", "0"), "192.0.2.1"),
    ):
        assert says in failed(words, capsys)


def command(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        interruptible("vote", *words, "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def began(process: subprocess.Popen[str]) -> tuple[str, VoteClient]:
    """The counts that it prints, and who talks to it."""
    assert process.stderr is not None
    counts, url = re.split(r" {4}", process.stderr.readline())[:2]
    return counts, VoteClient(url)


def test_a_killed_command_has_its_votes_and_an_interrupted_one_prints_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, votes = a_run(tmp_path / "first", "train", first=0), tmp_path / "votes.jsonl"
    with command(run, "--votes", votes, "--limit", "4") as process:
        counts, client = began(process)
        assert counts == "0 of 4 votes"
        client.vote(0, "left")
        client.vote(1, "tie")
        process.kill()
    assert len(read_votes(votes).cast) == 2
    with command(run, "--votes", votes, "--limit", "4", "--json") as process:
        counts, client = began(process)
        assert counts == "2 of 4 votes" and client.state()["pair"] == 2
        assert client.vote(2, "right")["done"] == 3
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stderr is not None
        facts = json.loads(process.stdout.read())
        assert process.stderr.read() == f"saved in {votes} and {tmp_path / 'votes-pairs.jsonl'}\n"
    assert process.returncode == 0
    assert facts == {"runs": [str(run)], "votes": 3, "ties": 1, "left": 1}
    with pytest.raises(SystemExit) as caught:
        main(["vote", "--result", str(votes)])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "3 votes, 1 of them ties; left preferred in 1 of 2\n"


SHOWN = re.findall(r"^    unirl vote (.*?)(?:\s+#.*)?$", "".join(map(Path.read_text, PAGES)), flags=re.MULTILINE)


@pytest.mark.parametrize("words", sorted(set(SHOWN)))
def test_a_command_that_a_page_shows_has_options_that_are_there(words: str) -> None:
    """They are run in tests/test_shown_votes.py."""
    assert vote.make_context("vote", words.split()).params["file"] is not None
