"""`unirl show`: the numbers of samples are those that a run computed and saved, and errors say what is there instead."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_runs import SMALL_TEXT, events, run
from unirl.core.cli import main
from unirl.core.types.inputs import Inputs
from unirl.core.types.rollout import Rollout
from unirl.core.types.serial import from_bytes
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.loop.saved_samples import read_samples, save_samples
from unirl.transfer.remote_rows import dehydrated, fetchable

JOINT = (
    *("run.max_steps=1", "run.media_every=1", "data.prompts_per_step=2", "data.eval=''", "stages.image.samples=2"),
    # Eight images; four of each rewrite are compared with each other below.
    *("stages.rewrite.samples=4", "run.threads=1"),
)
EPS = 1e-4
"""`advantage.eps`."""


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of a writer and a painter that train together, with a report."""
    return run(tmp_path_factory.mktemp("joint") / "run", *JOINT, recipe="quickstart-enhancer-joint", small=()).folder


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of a text model that trains on the best and the worst of each group."""
    words = ("advantage.keep_best=1", "advantage.keep_worst=1", "run.max_steps=1", "run.media_every=1", "run.threads=1")
    folder = tmp_path_factory.mktemp("pruned") / "run"
    return run(folder, *words, recipe="quickstart-text", small=SMALL_TEXT).folder


def shown(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["show", *map(str, words)])
    output = capsys.readouterr()
    assert caught.value.code == 0, output.err
    return output.out


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["show", *map(str, words)])
    assert caught.value.code in (1, 2)
    return capsys.readouterr().err


def saved(folder: Path, stage: str) -> Track:
    return from_bytes((folder / "samples" / "step-000000" / f"{stage}.safetensors").read_bytes(), Track)


def listed(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Stage -> sample -> its line."""
    lists = json.loads(shown(capsys, folder, "--json", *words))
    return {each["stage"]: {sample["sample"]: sample for sample in each["samples"]} for each in lists}


@pytest.mark.slow
def test_rewards_credit_and_advantages_are_those_of_the_run(joint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every sample, by formula from the scores of the images, and against the numbers of the step's event."""
    stages = listed(capsys, joint)
    rewrites, images = stages["rewrite"], stages["image"]
    assert (len(rewrites), len(images)) == (8, 16)
    (step,) = events(joint, "step")
    for name, samples in stages.items():
        rewards = [sample["reward"] for sample in samples.values()]
        # fp32 means of a few numbers in [0, 1].
        assert statistics.mean(rewards) == pytest.approx(step["metrics"][f"{name}/reward_mean"], abs=1e-6)
        assert statistics.pstdev(rewards) == pytest.approx(step["metrics"][f"{name}/reward_std"], abs=1e-6)
    for name, sample in rewrites.items():
        children = [image["reward"] for child, image in images.items() if child.startswith(f"{name}/")]
        assert len(children) == 2 and sample["reward"] == pytest.approx(statistics.mean(children), abs=1e-6)
        group = [other["reward"] for key, other in rewrites.items() if key.rsplit("/", 1)[0] == name.rsplit("/", 1)[0]]
        expected = (sample["reward"] - statistics.mean(group)) / (statistics.pstdev(group) + EPS)
        # fp32, divided by a standard deviation of 0.1 or more, or by EPS where all are equal and the numerator is 0.
        assert sample["advantage"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_sample_has_its_ancestors_with_tokens_steps_and_scores(
    joint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, rewrite = saved(joint, "image"), saved(joint, "rewrite")
    row = 5
    name = image.sample_ids[row]
    assert image.parent_ids is not None and image.rewards is not None and image.latent.log_probs is not None
    at = rewrite.sample_ids.index(image.parent_ids[row])
    facts = json.loads(shown(capsys, joint, "--sample", name, "--json"))
    assert facts["prompt"]["text"] == image.inputs.prompts[row]
    assert facts["prompt"]["metadata"] == image.metadata[row]
    first, last = facts["lineage"]
    assert (first["stage"], first["sample"], last["parent"]) == ("rewrite", image.parent_ids[row], first["sample"])
    # Tokens, with the text of each: together the completion and its end.
    assert [token["token"] for token in first["tokens"]] == rewrite.text.tokens[at].tolist()
    assert rewrite.text.log_probs is not None
    assert [token["log_prob"] for token in first["tokens"]] == rewrite.text.log_probs[at].tolist()
    pieces = "".join(token["text"] for token in first["tokens"])
    assert pieces.removesuffix("<|im_end|>") == first["text"] == last["inputs"]["text"]
    assert (first["algorithm"], last["algorithm"]) == ("grpo", "flow-grpo")
    (credit,), (score,) = first["rewards"], last["rewards"]
    assert (credit["name"], credit["kind"], credit["value"]) == ("image", "credit", first["reward"])
    assert (score["name"], score["kind"], score["weight"]) == ("shapes", "reward", 1.0)
    assert last["reward"] == float(image.rewards[row]) == score["value"] * score["weight"]
    assert {part: float(image.reward_parts[f"shapes/{part}"][row]) for part in score["parts"]} == score["parts"]
    # The schedule of ten steps of which the first half is stochastic and trained on.
    latents = last["latents"]
    assert [step["step"] for step in latents["steps"]] == latents["sde_steps"] == [0, 1, 2, 3, 4]
    assert [step["log_prob"] for step in latents["steps"]] == image.latent.log_probs[row].tolist()
    assert latents["sigmas"] == image.latent.sigmas.tolist() and latents["kernel"] == "flow-sde"
    assert image.latent.initial_noise is not None and latents["initial_noise"] == image.latent.initial_noise[row]
    # The file is that of the index, and shows an image of the recipe's size.
    lines = [json.loads(line) for line in (joint / "media" / "index.jsonl").read_text().splitlines()]
    (file,) = (one["file"] for line in lines for one in line["samples"] if one["sample"] == name)
    assert last["media"] == f"media/{file}"
    with Image.open(joint / last["media"]) as picture:
        assert picture.size == (64, 64)
    children = json.loads(shown(capsys, joint, "--sample", first["sample"], "--json"))["children"]
    assert name in [child["sample"] for child in children] and len(children) == 2


@pytest.mark.slow
def test_the_text_of_a_sample_fits_a_terminal_and_has_the_same_numbers(
    joint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = saved(joint, "image")
    text = shown(capsys, joint, "--sample", image.sample_ids[0])
    assert max(map(len, text.splitlines())) <= 100 and text.startswith(image.sample_ids[0])
    facts = json.loads(shown(capsys, joint, "--sample", image.sample_ids[0], "--json"))
    for stage in facts["lineage"]:
        for number in (stage["reward"], stage["group_rewards"]["mean"]):
            assert (str(int(number)) if number == int(number) else f"{number:.4f}") in text
    tokens = facts["lineage"][0]["tokens"]
    total = math.fsum(token["log_prob"] for token in tokens)
    assert f"{total:.4f} in all" in text and "'<|im_end|>'" in text and "credit of image" in text
    cut = shown(capsys, joint, "--sample", image.sample_ids[0], "--tokens", "2")
    assert f"... {len(tokens) - 2} more; --tokens 0 shows all ..." in cut


@pytest.mark.slow
def test_the_list_has_the_worst_first_and_the_best_last(joint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = saved(joint, "image")
    for key, values in (("reward", image.rewards), ("shapes/color", image.reward_parts["shapes/color"])):
        assert values is not None
        lines = shown(capsys, joint, "--stage", "image", "--sort", key, "--limit", "6").splitlines()
        rows = [line for line in lines if "/image-" in line]
        numbers = [float(line.split()[0]) for line in rows]
        expected = sorted(values.tolist())
        # Four decimals are shown.
        assert numbers == pytest.approx([*expected[:3], *expected[-3:]], abs=5e-5)
        assert any("... 10 more" in line for line in lines) and not any(" rewrite, " in line for line in lines)
        assert max(map(len, lines)) <= 100


@pytest.mark.slow
def test_samples_that_an_algorithm_leaves_out_are_listed_as_such(
    pruned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (samples,) = listed(capsys, pruned).values()
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, sample in samples.items():
        groups.setdefault(name.rsplit("/", 1)[0], []).append(sample)
    assert [len(group) for group in groups.values()] == [4] * 4
    for group in groups.values():
        kept = [sample["reward"] for sample in group if not sample["is_left_out"]]
        rewards = [sample["reward"] for sample in group]
        assert sorted(kept) == [min(rewards), max(rewards)]
        assert all((sample["advantage"] is None) == sample["is_left_out"] for sample in group)
    left = next(name for name, sample in samples.items() if sample["is_left_out"])
    assert "none: grpo left this sample out of training" in shown(capsys, pruned, "--sample", left)
    assert "left out" in shown(capsys, pruned)


@pytest.mark.slow
def test_the_page_of_the_run_has_ids_that_show_takes(joint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (joint / "report.html").read_text(encoding="utf-8")
    ids = re.findall(r' title="(r0/[^"]*)"', page)
    assert ids and {*ids} <= {*saved(joint, "image").sample_ids, *saved(joint, "rewrite").sample_ids}
    assert shown(capsys, joint, "--sample", ids[-1]).startswith(ids[-1])


@pytest.mark.slow
def test_what_is_not_there_gets_one_clear_error(
    joint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = saved(joint, "image").sample_ids[0]
    for words, says in (
        ([joint.parent / "rum"], "rum: no such folder, expected a run folder; did you mean 'run'?"),
        ([joint / "media"], "media: got no events.jsonl in it, expected a run folder"),
        ([joint, "--sample", f"{name}0"], f"of the 24 samples of step 0 is; did you mean '{name}'?"),
        ([joint, "--sample", "r7/a/0"], "samples of step 7 are not saved, and 'r7/a/0' is of that step; saved are 0"),
        ([joint, "--step", "3"], "--step: got 3, expected one of 0; run.media_every=1 saves them."),
        ([joint, "--stage", "imgae"], "--stage: got 'imgae', expected one of rewrite, image; did you mean 'image'?"),
        ([joint, "--sort", "shape"], "did you mean 'shapes'?"),
    ):
        assert says in refused(capsys, *words), words
    copy = shutil.copytree(joint, tmp_path / "copy")
    file = copy / "samples" / "step-000000" / "image.safetensors"
    content = file.read_bytes()
    assert content.count(b'{\\"format\\":1,') == 1
    file.write_bytes(content.replace(b'{\\"format\\":1,', b'{\\"format\\":2,'))
    error = refused(capsys, copy)
    assert f"{file}: these samples cannot be read" in error and "format 2 was found" in error
    assert "The run was made with unirl-model-qwen3 " in error
    file.write_bytes(content)
    started, *others = (copy / "events.jsonl").read_text().splitlines()
    (copy / "events.jsonl").write_text("\n".join([started.replace('"name":"rewrite"', '"name":3', 1), *others]))
    assert "stages[0].name: got 3, expected a text" in refused(capsys, copy, "--stage", "rewrite")
    shutil.rmtree(copy / "samples")
    lines = (copy / "events.jsonl").read_text().replace('"media_every":1', '"media_every":0')
    (copy / "events.jsonl").write_text(lines)
    assert "the run has no saved samples. run.media_every is 0. Set it to N" in refused(capsys, copy)


def test_what_would_move_the_cursor_is_written_out() -> None:
    from unirl.tools.show.text import printable

    assert printable("red \x1b[31m\x07\n\u202edisk") == r"red \x1b[31m\x07\n\u202edisk"
    assert printable("красный 紅い 👩‍🦰") == "красный 紅い 👩‍🦰"


def test_arrays_in_other_processes_are_fetched_to_be_saved(tmp_path: Path) -> None:
    """As under Ray: positions and log-probs of long schedules stay where they were made, and so do the latents."""
    steps = 40
    segment = LatentSegment(
        latents=torch.zeros(2, steps + 1, 4, 8, 8),
        positions=torch.arange(steps + 1).expand(2, -1).contiguous(),
        sde_steps=torch.arange(steps).expand(2, -1).contiguous(),
        log_probs=torch.arange(2 * steps, dtype=torch.float32).reshape(2, steps),
        sigmas=torch.linspace(1, 0, steps + 1),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
    )
    track = Track(
        name="image",
        sample_ids=("r3/a/0", "r3/a/1"),
        group_ids=("r3/a", "r3/a"),
        inputs=Inputs.of_texts(["a ring"] * 2),
        metadata=({}, {}),
        segment=segment,
        sample_weights=torch.ones(2),
        status=(Status.COMPLETED,) * 2,
        policy_version=(0, 0),
    )
    kept: list[torch.Tensor] = []

    def keep(tensors: Any) -> list[int]:
        kept.extend(tensors)
        return list(range(len(kept) - len(tensors), len(kept)))

    def fetch(wanted: Any) -> list[torch.Tensor]:
        return [torch.cat([kept[p.blob][p.start : p.start + p.count] for p in rows.pieces]) for rows in wanted]

    left = dehydrated(track, keep)
    assert not isinstance(left.latent.positions, torch.Tensor) and not isinstance(left.latent.sde_steps, torch.Tensor)
    left = dataclasses.replace(left, segment=fetchable(left.latent, fetch))
    save_samples(tmp_path, Rollout(tracks={"image": left}), {}, step=3)
    result = read_samples(tmp_path, 3)["image"].track.latent
    for name in ("positions", "sde_steps", "log_probs", "sigmas"):
        assert torch.equal(getattr(result, name), getattr(segment, name))
    assert result.latents.shape == (2, steps + 1, 0)
