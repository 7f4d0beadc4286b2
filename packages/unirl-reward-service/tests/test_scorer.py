"""Scorer processes: batches, settings and versions; the commands; no pickle anywhere."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from resource import RLIMIT_NOFILE, setrlimit
from typing import Any

import pytest
import torch
from PIL import Image
from reward_services import request, samples
from unirl.core.cli import main
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.spec import RewardSpec
from unirl.loop.checked_reward import CheckedReward
from unirl.reward_service.config import ServiceConfig, read_config
from unirl.reward_service.loading import LoadedReward, load_reward
from unirl.reward_service.scorer import score_bodies
from unirl.reward_service.server import api_keys

# Scores carry a hash of the code of the reward's package.

ROOT = Path(__file__).parents[3]


class Numbers:
    """The number that each prompt is; one below 0 has no score, and a word raises."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def score(self, samples: ScoreInput) -> Scores:
        self.sizes.append(len(samples))
        assert len(set(samples.sample_ids)) == len(samples), "ids of several requests are mixed up"
        values = torch.tensor([float(prompt) for prompt in samples.inputs.prompts])
        scored = values >= 0
        return Scores(values=values.where(scored, torch.nan), parts={"half": values / 2}, scored=scored)

    def close(self) -> None:
        pass


def loaded(reward: Any) -> LoadedReward:
    spec = RewardSpec(name="numbers", summary="x", build="x:y", config="x:y", scale="x", media="image", parts=("half",))
    return LoadedReward(spec=spec, reward=CheckedReward("reward.numbers", reward, spec=spec), version="v")


def test_requests_are_scored_together_and_samples_without_a_score_stay_so() -> None:
    reward = Numbers()
    bodies = [request(f"b-{n}-00000", samples([str(n), str(-n)]), codec=c) for n, c in ((1, "raw"), (2, "png"))]
    other = request("b-3-00000", samples(["3"], pixels=torch.zeros(1, 3, 8, 8)))
    results = score_bodies(loaded(reward), [*bodies, other])
    assert reward.sizes == [4, 1]
    assert results[0] == {"values": [1.0, 0.0], "parts": {"half": [0.5, 0.0]}, "scored": [True, False]}
    assert results[1] == {"values": [2.0, 0.0], "parts": {"half": [1.0, 0.0]}, "scored": [True, False]}
    assert results[2] == {"values": [3.0], "parts": {"half": [1.5]}, "scored": [True]}


def test_a_request_that_fails_fails_alone() -> None:
    bodies = [request(f"b-{n}-00000", samples([text])) for n, text in enumerate(("1", "a word", "3"))]
    first, second, third = score_bodies(loaded(Numbers()), bodies)
    assert (first["values"], third["values"]) == ([1.0], [3.0])
    code, message = second["error"]
    assert code == "reward_failed" and message.startswith("reward.numbers: raised ValueError: could not convert")


def test_scores_of_another_number_and_scores_that_are_not_finite_are_errors() -> None:
    class Wrong(Numbers):
        def score(self, samples: ScoreInput) -> Scores:
            if samples.inputs.prompts[0] == "nan":
                return Scores(values=torch.tensor([float("nan")]), parts={"half": torch.zeros(1)})
            return Scores(values=torch.zeros(3), parts={"half": torch.zeros(1)})

    reward = loaded(Wrong()).reward
    with pytest.raises(RewardFailed, match=r"values of Scores is a tensor of shape \(3,\)"):
        reward.score(samples(["1"]))
    with pytest.raises(RewardFailed, match="values of Scores is nan for sample"):
        reward.score(samples(["nan"]))


def test_a_version_is_that_of_settings_files_and_code_and_not_of_places(tmp_path: Path) -> None:
    catalog = Catalog.discover()

    def version(use: str, **settings: Any) -> str:
        return load_reward(use, settings, device="cpu", catalog=catalog).version

    assert version("jpeg-size") == version("jpeg-size", quality=95, weight=3.0)
    assert version("jpeg-size") != version("jpeg-size", quality=90)
    assert version("jpeg-size") != version("brightness")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4), "red").save(tmp_path / name / "image.png")
        (tmp_path / name / "code.py").write_text("def one(prompts):\n    return [1.0] * len(prompts)\n")
    images = [version("pixel-target", image=str(tmp_path / name / "image.png")) for name in ("a", "b")]
    codes = [version("function", target=f"{tmp_path}/{name}/code.py:one") for name in ("a", "b")]
    assert images[0] == images[1] and codes[0] == codes[1]
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "b/image.png")
    with (tmp_path / "b/code.py").open("a") as code:
        code.write("# changed\n")
    assert version("pixel-target", image=str(tmp_path / "b/image.png")) != images[0]
    assert version("function", target=f"{tmp_path}/b/code.py:one") != codes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scorers: {a: {use: x, batch: 3}}", "Key 'batch' not in 'ScorerConfig'"),
        ("scorers: {}", "scorers: got none, expected one or more"),
        ("scorers: {a: {settings: {}}}", "Missing mandatory value|use"),
        ("scorers: [", "while parsing"),
        ("scorers: {a: {use: x, max_queue: 0}}", "scorers.a.max_queue: got 0, expected 1 or more"),
        ("port: 70000\nscorers: {a: {use: x}}", "port: got 70000"),
        ("host: 0.0.0.0\nscorers: {a: {use: x}}", "keys_env: got none with host '0.0.0.0', which others reach"),
        (
            "hosts: ['scorers-1:80']\nscorers: {a: {use: x}}",
            r"hosts\[0\]: got 'scorers-1:80', expected a name without a port",
        ),
        ("hosts: ['lab*']\nscorers: {a: {use: x}}", r"hosts\[0\]: got 'lab\*', expected a name without a port, or"),
        ("host: scorers-1\nscorers: {a: {use: x}}", "keys_env: got none with host 'scorers-1'"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rewards.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=message) as error:
        read_config(file)
    assert str(error.value).startswith(str(file))


@pytest.mark.parametrize(("value", "message"), [("", "no key"), ("short, ", "a key of fewer than 16 characters")])
def test_keys_that_are_absent_or_weak_are_refused(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEYS", value)
    with pytest.raises(RecipeError, match=f"keys_env: SOME_KEYS has {message}"):
        api_keys(ServiceConfig(keys_env="SOME_KEYS"))


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_files_are_scored_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for color in ("black", "white"):
        Image.new("RGB", (8, 8), color).save(tmp_path / f"{color}.png")
    files = [str(tmp_path / name) for name in ("white.png", "black.png")]
    assert run("score", "--reward", "brightness", "--json", *files) == 0
    shown = json.loads(capsys.readouterr().out)["samples"]
    # 0.299 + 0.587 + 0.114 in fp32.
    assert [row["score"] for row in shown] == [pytest.approx(1.0, abs=1e-6), 0.0]
    (tmp_path / "answer.txt").write_text("forty-two\n")
    answer = ["score", "--reward", "exact-match", str(tmp_path / "answer.txt")]
    assert run(*answer, "--metadata", '{"answer": "FORTY-TWO"}', "--set", "ignore_case=false") == 0
    table = capsys.readouterr().out
    assert "answer.txt" in table and "exact-match: 1 if the text equals" in table
    for words, code, message in (
        ([*answer, "--metadata", "[]"], 2, "--metadata: got '[]', expected a JSON object"),
        ([*answer, "--set", "case=1"], 2, "reward.exact-match: Key 'case' not in"),
        ([*answer, files[0]], 2, "got image, expected text"),
        (answer, 1, "metadata 'answer'"),
        (["score", "--reward", "exact", *files], 2, "did you mean 'exact-match'?"),
    ):
        assert run(*words) == code
        assert message in capsys.readouterr().err


def test_a_service_that_does_not_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("reward-service", "check", "http://127.0.0.1:9") == 1
    assert "ConnectError" in capsys.readouterr().err


def test_too_few_open_files_are_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "rewards.yaml").write_text("scorers: {light: {use: brightness}}\n")
    command = [sys.executable, "-m", "unirl.core", "reward-service", "serve", str(tmp_path / "rewards.yaml")]
    result = subprocess.run(
        [*command, "--port", "0"],
        preexec_fn=lambda: setrlimit(RLIMIT_NOFILE, (70, 70)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "max_connections: this process may open 70 files, expected more than 72" in result.stderr


PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}


def test_nothing_on_the_wire_is_pickled() -> None:
    """Neither side imports a module that unpickles, or calls a loader that does."""
    files = [
        *ROOT.glob("packages/unirl-reward-service/src/**/*.py"),
    ]
    assert len(files) > 15
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [item.name for item in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("np", "load"), ("numpy", "load")}, file
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, file
            assert not PICKLES & {name.split(".")[0] for name in names}, f"{file} imports {names}"
