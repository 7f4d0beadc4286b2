"""`unirl vote`: which images are compared, that nothing tells them apart, and what is stored."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from unirl.core.data.prompts import read_prompts
from unirl.core.errors import RecipeError
from unirl.core.types.data import MediaRef
from unirl.trackers.report.history import RunFolderError, read_history
from unirl.trackers.report.vote.pairs import VotePair, held_out_pairs, training_pairs
from unirl.trackers.report.vote.result import result_facts
from unirl.trackers.report.vote.session import VotingSession
from unirl.trackers.report.vote.votes_file import VotedRun, VotesFile, opened, pairs_file, read_votes
from view_runs import END, STAGES, start, step, with_images, with_samples, write

REPORT = {"report": {"use": "report"}}
RESOLVED = {"run": {"media_every": 10}, "data": {"samples_per_prompt": 4, "eval": "held.jsonl"}, "tracker": REPORT}


def a_run(folder: Path, **fields: Any) -> Path:
    evaluation = {"seed": 3, "stages": {}}
    return write(folder, start(**{"evaluation": evaluation, "resolved": RESOLVED, **fields}), step(1, loss=0.5), END)


def samples(prompts: Sequence[str], each: int, *, first: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """Samples of each prompt, of one colour each."""
    return [
        {"sample": f"r0/{prompt}/{n}", "prompt": prompt, "colour": first + at * each + n, **fields}
        for at, prompt in enumerate(prompts)
        for n in range(each)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps with two prompts of four samples each, the last ones of one colour; and held-out samples."""
    folder = a_run(tmp_path / "first")
    with_images(folder, "train", 1, samples(("p", "q"), 4))
    with_images(folder, "train", 2, samples(("p", "q"), 4, first=8))
    return with_images(folder, "eval", 2, samples(("h",), 2, first=90))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that evaluated two prompts, 20 samples each, at two steps."""
    folders = tmp_path / "one", tmp_path / "other"
    for number, folder in enumerate(folders):
        a_run(folder)
        with_images(folder, "eval", 0, samples(("p", "q"), 20, first=5000))
        with_images(folder, "eval", 3, samples(("p", "q"), 20, first=1000 * number))
    return folders


def pairs_of(folder: Path, seed: int = 0) -> list[VotePair]:
    return training_pairs(read_history(folder), seed=seed)


def held_out(folders: Sequence[Path], seed: int = 0) -> list[VotePair]:
    one, other = map(read_history, folders)
    return held_out_pairs(one, other, seed=seed)


@contextmanager
def voting(path: Path, folders: Sequence[Path], pairs: Sequence[VotePair]) -> Iterator[VotesFile]:
    runs = [VotedRun(folder=folder, began=float(number)) for number, folder in enumerate(folders)]
    with opened(path, runs, pairs, seed=0) as file:
        yield file


def colour(content: Path) -> int:
    with Image.open(content) as image:
        pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    red, green, blue = map(int, pixel)
    return red + 256 * green + 65536 * blue


def test_pairs_are_all_of_a_prompt_and_step_and_every_image_comes_before_any_comes_again(run: Path) -> None:
    pairs = pairs_of(run)
    colours = [frozenset((colour(pair.first.file), colour(pair.second.file))) for pair in pairs]
    # Groups are 0 to 3, 4 to 7 and so on.
    every = {frozenset(pair) for group in range(4) for pair in combinations(range(4 * group, 4 * group + 4), 2)}
    assert len(colours) == len(every) == 24 and set(colours) == every
    assert {pair.prompt for pair in pairs if colour(pair.first.file) % 8 < 4} == {"p"}
    for number in range(3):
        assert Counter(image for pair in colours[8 * number : 8 * number + 8] for image in pair) == Counter(range(16))


def test_order_and_sides_follow_from_the_seed(run: Path, two: tuple[Path, Path]) -> None:
    assert pairs_of(run) == pairs_of(run) != pairs_of(run, seed=1)
    assert {pair.key for pair in pairs_of(run)} == {pair.key for pair in pairs_of(run, seed=1)}
    for pairs in (pairs_of(run), held_out(two)):
        sides = [[pair.is_first_left(seed=seed) for pair in pairs] for seed in range(50)]
        left = sum(map(sum, sides))
        # A fair coin is within 5 standard deviations but once in two million.
        assert abs(left - 25 * len(pairs)) < 5 * math.sqrt(50 * len(pairs)) / 2
        assert sides[0] != sides[1] and sides[0] == [pair.is_first_left(seed=0) for pair in pairs]


def test_of_three_samples_all_pairs_are_asked_and_two_equal_images_are_none(tmp_path: Path) -> None:
    folder = with_images(a_run(tmp_path / "run"), "train", 1, samples(("p",), 3))
    assert len({pair.key for pair in pairs_of(folder)}) == 3
    rows = [{**row, "colour": colour} for row, colour in zip(samples(("p",), 3), (1, 1, 2), strict=True)]
    folder = with_images(a_run(tmp_path / "equal"), "train", 1, rows)
    found = pairs_of(folder)
    assert [{colour(pair.first.file), colour(pair.second.file)} for pair in found] == [{1, 2}, {1, 2}]
    # They are one pair of images: a vote on it is one on both.
    assert len({pair.key for pair in found}) == 1


def test_two_runs_are_compared_on_the_same_prompt_and_noise_of_their_last_evaluations(two: tuple[Path, Path]) -> None:
    pairs = held_out(two)
    assert len(pairs) == 40 and Counter(pair.prompt for pair in pairs) == {"p": 20, "q": 20}
    assert all(colour(pair.second.file) - colour(pair.first.file) == 1000 for pair in pairs)
    assert all(pair.first.file.is_relative_to(two[0]) for pair in pairs)
    # Every prompt comes once before any comes again.
    assert all(len({pair.prompt for pair in pairs[at : at + 2]}) == 2 for at in range(0, 40, 2))


def test_images_of_several_stages_are_compared_and_are_no_pairs_to_train_on(tmp_path: Path) -> None:
    """One rewrite each."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for number, folder in enumerate(folders):
        with_samples(a_run(folder, stages=STAGES))
        child = {"sample": "r0/p/0/image-0", "prompt": "p", "parent": "step-000000/r.txt"}
        index = folder / "media" / "index.jsonl"
        index.write_text(index.read_text().splitlines()[0] + "\n")
        with_images(folder, "eval/image", 0, [{**child, "colour": number}])
        with_images(folder, "train/image", 0, [{**child, "colour": number}, {**child, "colour": number + 2}])
    (pair,) = held_out(folders)
    assert (pair.prompt, colour(pair.first.file), colour(pair.second.file)) == ("p", 0, 1)
    with pytest.raises(RunFolderError, match="images of 'image' are made from samples of another stage"):
        pairs_of(folders[0])


def test_pairs_keep_what_an_editing_prompt_refers_to(run: Path, tmp_path: Path) -> None:
    folder = a_run(tmp_path / "edit")
    (folder / "media" / "inputs").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(folder / "media" / "inputs" / "a.png")
    source = run / "media" / "step-000001" / "train-00.png"
    media = [{"modality": "image", "role": "source", "uri": str(source)}]
    with_images(folder, "train", 1, samples(("p",), 2, inputs=["inputs/a.png"], media=media))
    (pair,) = pairs = pairs_of(folder)
    with voting(tmp_path / "votes.jsonl", [folder], pairs) as file:
        file.add(pair, left=0, preferred=1)
    (row,) = read_prompts(tmp_path / "votes-pairs.jsonl")
    assert row.media[0] == MediaRef(modality="image", role="source", uri=str(source))
    assert [ref.role for ref in row.media] == ["source", "preferred", "rejected"]
    index = folder / "media" / "index.jsonl"
    index.write_text(index.read_text().replace(json.dumps(media), "[]"))
    with pytest.raises(RunFolderError, match="made by an earlier report"):
        pairs_of(folder)


def without(name: str, **settings: Any) -> Mapping[str, Any]:
    return {**RESOLVED, name: settings}


@pytest.mark.parametrize(
    ("resolved", "rows", "says"),
    [
        (RESOLVED, None, "no training images: got tracker 'report' on and run.media_every=10"),
        (without("tracker"), None, "got tracker 'report' off"),
        (without("run", media_every=0), None, "run.media_every=0. The report saves"),
        (without("data", samples_per_prompt=1), samples(("p", "q"), 1), "data.samples_per_prompt=1. Train with"),
        (RESOLVED, samples(("p",), 2, parent="nowhere.txt"), "are made from samples of another stage"),
    ],
)
def test_a_run_without_pairs_is_refused_with_the_setting(
    tmp_path: Path, resolved: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None, says: str
) -> None:
    folder = a_run(tmp_path / "run", resolved=resolved)
    if rows is not None:
        with_images(folder, "train", 1, rows)
    with pytest.raises(RunFolderError) as caught:
        pairs_of(folder)
    assert says in str(caught.value) and str(folder) in str(caught.value)


def test_completions_and_videos_are_refused(run: Path, tmp_path: Path) -> None:
    folder = with_samples(a_run(tmp_path / "text"))
    index = folder / "media" / "index.jsonl"
    index.write_text(index.read_text().splitlines()[0].replace("eval/rewrite", "train") + "\n")
    with pytest.raises(RunFolderError, match="it saved training completions and no images"):
        pairs_of(folder)
    with pytest.raises(RunFolderError, match="it saved no held-out images: got tracker 'report' on and data"):
        held_out([folder, run])
    shutil.copyfile(run / "media" / "step-000001" / "train-00.png", run / "media" / "step-000001" / "train-00.webp")
    with pytest.raises(RunFolderError, match="got videos, expected images: of a video a small animation is saved"):
        pairs_of(run)


def animated(folder: Path, *, frames: int = 3, duration: int = 100) -> None:
    """Give every held-out image an animation that begins with its colour, as the report does for videos."""
    for file in (folder / "media").rglob("eval-*.png"):
        with Image.open(file) as opened:
            first = opened.convert("RGB")
        rest = [Image.new("RGB", first.size, (255, 255 - number, 0)) for number in range(frames - 1)]
        first.save(
            file.with_suffix(".webp"), save_all=True, append_images=rest, duration=duration, loop=0, lossless=True
        )


def test_videos_of_two_runs_are_compared_by_their_animations(two: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in two:
        animated(folder)
    pairs = held_out(two)
    assert {picture.file.suffix for pair in pairs for picture in (pair.first, pair.second)} == {".webp"}
    assert len(pairs) == 40
    with voting(tmp_path / "votes.jsonl", two, pairs) as file:
        session = VotingSession(pairs, file)
        state = session.state()
        left = session.picture(state["pair"], "left")
        assert left is not None
        with Image.open(io.BytesIO(left)) as shown:
            assert (shown.format, getattr(shown, "n_frames", 1)) == ("WEBP", 3)
        session.vote(state["pair"], "left")
        assert result_facts(file.votes)["votes"] == 1
        assert file.votes.cast[0].files[0].endswith(".webp")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"frames": 4}, "4 x 4 pixels, 3 frames of 100 ms and of 4 x 4 pixels, 4 frames of 100 ms, expected one size"),
        (
            {"duration": 50},
            "4 x 4 pixels, 3 frames of 100 ms and of 4 x 4 pixels, 3 frames of 50 ms, expected one size",
        ),
        (None, "4 x 4 pixels, 3 frames of 100 ms and of 4 x 4 pixels, expected one size"),
    ],
)
def test_videos_that_would_tell_the_runs_apart_are_refused(
    two: tuple[Path, Path], given: dict[str, int] | None, says: str
) -> None:
    animated(two[0])
    if given is not None:
        animated(two[1], **given)
    with pytest.raises(RunFolderError) as caught:
        held_out(two)
    assert f"got held-out samples of {says}" in str(caught.value)


def test_runs_that_cannot_be_compared_are_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    for name, fields, rows, says in (
        ("seed", {"evaluation": {"seed": 4}}, samples(("p",), 2), f"eval.seed: got 3 in {two[0]} and 4 in"),
        ("prompts", {}, samples(("z",), 2), "share no prompt of one id, got 'p r0/p/0' and 'z r0/z/0'"),
        ("ids", {}, [{"sample": "r0/z/0", "prompt": "p", "colour": 1}], "got 'p r0/p/0' and 'p r0/z/0'"),
        ("old", {}, [{"sample": "", "prompt": "p", "colour": 1}], "share no prompt of one id"),
        (
            "size",
            {},
            samples(("p",), 2, size=5),
            "got held-out samples of 4 x 4 pixels and of 5 x 5 pixels, expected one size",
        ),
    ):
        folder = with_images(a_run(tmp_path / name, **fields), "eval", 1, rows)
        with pytest.raises(RunFolderError) as caught:
            held_out([two[0], folder])
        assert says in str(caught.value), name


def test_what_a_page_is_told_is_the_same_whichever_run_is_on_the_left(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All states of a session in which the first run is always on the left, and of one in which it never is."""
    pairs, told, shown = held_out(two)[:6], list[list[dict[str, Any]]](), list[list[int]]()
    for is_first_left in (True, False):
        monkeypatch.setattr(VotePair, "is_first_left", lambda *_, seed, side=is_first_left: side)
        with voting(tmp_path / f"{is_first_left}.jsonl", two, pairs) as file:
            session = VotingSession(pairs, file)
            states, lefts = [session.state()], []
            while "result" not in states[-1]:
                (tmp_path / "left.png").write_bytes(session.picture(states[-1]["pair"], "left") or b"")
                lefts.append(colour(tmp_path / "left.png"))
                states.append(session.vote(states[-1]["pair"], "tie"))
        # The token of a session is random.
        told.append([{key: value for key, value in state.items() if key != "session"} for state in states[:-1]])
        shown.append(lefts)
    assert told[0] == told[1] and len(told[0]) == 6
    assert all(state.keys() == {"done", "total", "pair", "prompt", "num_inputs"} for state in told[0])
    assert [other - one for one, other in zip(*shown, strict=True)] == [1000] * 6


def test_a_vote_prefers_the_image_on_its_side(two: tuple[Path, Path], tmp_path: Path) -> None:
    """A voter who takes the second run's image wherever it is: it wins every vote."""
    pairs = held_out(two)
    path = tmp_path / "votes.jsonl"
    with voting(path, two, pairs) as file:
        session = VotingSession(pairs, file, limit=30)
        state = session.state()
        while "result" not in state:
            (tmp_path / "left.png").write_bytes(session.picture(state["pair"], "left") or b"")
            state = session.vote(state["pair"], "left" if colour(tmp_path / "left.png") >= 1000 else "right")
    facts = result_facts(read_votes(path))
    assert (facts["votes"], facts["ties"], facts["preferred"], facts["win_rate"]) == (30, 0, [0, 30], 1.0)
    assert 0 < facts["left"] < 30
    # Held-out images are not for training.
    assert sorted(tmp_path.glob("*.jsonl")) == [path]


def test_each_vote_is_in_the_file_at_once_and_the_pairs_are_a_prompt_file(run: Path, tmp_path: Path) -> None:
    pairs, path = pairs_of(run), tmp_path / "some" / "votes.jsonl"
    with voting(path, [run], pairs) as file:
        for number, (pair, preferred) in enumerate(zip(pairs, (0, 1, None, 0), strict=False)):
            file.add(pair, left=number % 2, preferred=preferred)
            assert len(read_votes(path).cast) == number + 1
        rows = read_prompts(pairs_file(path))
        for row, pair, preferred in zip(rows, (pairs[0], pairs[1], pairs[3]), (0, 1, 0), strict=True):
            sides = (pair.first, pair.second) if preferred == 0 else (pair.second, pair.first)
            assert row.text == pair.prompt
            assert [(ref.modality, ref.role) for ref in row.media] == [("image", "preferred"), ("image", "rejected")]
            assert [Path(ref.uri).resolve() for ref in row.media] == [side.file for side in sides]
        assert [row.prompt_id for row in rows] == ["vote-0", "vote-1", "vote-3"]
        file.undo()
        file.undo()
        assert [vote.preferred for vote in read_votes(path).cast] == [0, 1]
        assert [row.prompt_id for row in read_prompts(pairs_file(path))] == ["vote-0", "vote-1"]
        file.add(pairs[3], left=0, preferred=1)
    votes = read_votes(path)
    assert [(vote.left, vote.preferred, vote.number) for vote in votes.cast] == [(0, 0, 0), (1, 1, 1), (0, 1, 4)]
    # Paths start at the folder of the file, so that both may move.
    uri = json.loads(pairs_file(path).read_text().splitlines()[0])["media"][0]["uri"]
    assert uri.startswith("../first/media/step-00000")


def test_voting_continues_where_it_ended_after_a_crash_within_a_line(run: Path, tmp_path: Path) -> None:
    pairs, path = pairs_of(run), tmp_path / "votes.jsonl"
    with voting(path, [run], pairs) as file:
        first = VotingSession(pairs, file)
        first.vote(0, "left")
        first.vote(1, "tie")
    whole = path.read_bytes()
    with path.open("ab") as cut:
        cut.write(b'{"kind":"vote","step":0,"ti')
    pairs_file(path).unlink()
    with voting(path, [run], pairs) as file:
        session = VotingSession(pairs, file)
        assert (session.state()["done"], session.state()["total"], session.state()["pair"]) == (2, 24, 2)
        assert len(read_prompts(pairs_file(path))) == 1
        session.vote(2, "right")
        assert path.read_bytes().startswith(whole) and len(read_votes(path).cast) == 3
        assert session.undo(3)["pair"] == 2 and session.undo(2)["pair"] == 1


def test_a_run_that_grew_has_new_pairs_and_none_twice(run: Path, tmp_path: Path) -> None:
    path, before = tmp_path / "votes.jsonl", pairs_of(run)
    with voting(path, [run], before) as file:
        for number in range(24):
            VotingSession(before, file).vote(number, "left")
    with_images(run, "train", 3, samples(("p",), 2, first=70))
    after = pairs_of(run)
    with voting(path, [run], after) as file:
        session = VotingSession(after, file)
        state = session.state()
        assert (state["done"], state["total"]) == (24, 25)
        assert {colour(after[state["pair"]].first.file), colour(after[state["pair"]].second.file)} == {70, 71}


def test_votes_on_images_that_a_resumed_run_made_again_count_and_are_not_trained_on(run: Path, tmp_path: Path) -> None:
    path, pairs = tmp_path / "votes.jsonl", pairs_of(run)
    with voting(path, [run], pairs) as file:
        session = VotingSession(pairs, file)
        session.vote(0, "left")
        session.vote(1, "left")
    Image.new("RGB", (4, 4), "white").save(pairs[0].first.file)
    with voting(path, [run], pairs_of(run)) as file:
        assert file.num_of_other_images == 1 and len(file.votes.cast) == 2
        assert [row.prompt_id for row in read_prompts(pairs_file(path))] == ["vote-1"]


def test_a_run_may_move_with_its_votes(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    with voting(path, [run], pairs_of(run)) as file:
        VotingSession(pairs_of(run), file).vote(0, "left")
    moved = run.rename(tmp_path / "moved")
    with voting(path, [moved], pairs_of(moved)) as file:
        assert file.num_of_other_images == 0
        assert Path(read_prompts(pairs_file(path))[0].media[0].uri).is_relative_to(moved)


def test_a_votes_file_that_does_not_fit_is_refused(run: Path, tmp_path: Path) -> None:
    pairs, path = pairs_of(run), tmp_path / "votes.jsonl"
    runs = [VotedRun(folder=run, began=0.0)]
    with (
        opened(path, runs, pairs, seed=0),
        pytest.raises(RecipeError, match="another `unirl vote` is writing to it"),
        opened(path, runs, pairs, seed=0),
    ):
        pass
    content = path.read_bytes()
    for others, seed, says in (
        (
            [VotedRun(folder=tmp_path / "z", began=1.0)],
            0,
            f"has votes on {run}, and you vote on {tmp_path / 'z'}. Give",
        ),
        ([*runs, *runs], 0, f"has votes on {run}, and you vote on {run} and {run}"),
        (runs, 5, f"--seed: got 5, but {path} was begun with seed 0"),
    ):
        with pytest.raises(RecipeError) as caught, opened(path, others, pairs, seed=seed):
            pass
        assert says in str(caught.value) and path.read_bytes() == content
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "notes.txt").write_text("without an end of line")
    for name, says in (
        ("prompts.jsonl", "prompts.jsonl:1: no event"),
        ("notes.txt", "does not begin with the runs"),
        ("first/events.jsonl", "does not begin with the runs"),
        ("first", "it cannot be written: Is a directory"),
        ("prompts.jsonl/votes.jsonl", "it cannot be written: "),
    ):
        before = (tmp_path / name).read_bytes() if (tmp_path / name).is_file() else None
        with pytest.raises(RecipeError) as caught, opened(tmp_path / name, runs, pairs, seed=0):
            pass
        assert says in str(caught.value) and "votes" in str(caught.value)
        assert before is None or (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"kind": "vote"}, "votes.jsonl:2: "),
        ({"kind": "vote", "left": 2, "samples": [{}, {}]}, "left 2"),
        ({"kind": "vote", "left": 0, "preferred": 7, "samples": [{}, {}]}, "preferred 7"),
        ({"kind": "vote", "left": 0, "samples": [{}]}, "got 1 samples"),
        (
            {"kind": "vote", "left": 0, "prompt": "p", "samples": [{}, {}]},
            "samples[0].sha256: got none, expected a text",
        ),
        ({"kind": "undone"}, "kind: got 'undone'"),
        ({"kind": "step"}, "kind: got 'step'"),
    ],
)
def test_a_line_that_is_no_vote_is_refused(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    path = tmp_path / "votes.jsonl"
    begin = {"kind": "voting", "step": 0, "time": 1.0, "seed": 0, "runs": [{"folder": "a", "began": 1.0}]}
    path.write_text("".join(json.dumps(each) + "\n" for each in (begin, {"step": 0, "time": 1.0, **line})))
    with pytest.raises(RecipeError) as caught:
        read_votes(path)
    assert says in str(caught.value)
