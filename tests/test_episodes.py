"""Episodes: answers as they were sampled, observations masked between them, budgets, returns, and what resumes."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import catalog, copy_up_to, run, steps, tensors
from unirl.core.cli import main
from unirl.core.data.prompts import read_prompts
from unirl.core.data.run_data import read_data
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.core.match.match import match
from unirl.core.recipe.compose import compose
from unirl.core.roles import Observation, text_model
from unirl.core.specs.plan import Plan
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request
from unirl.core.types.track import Status, Track
from unirl.loop.build import build_parts
from unirl.loop.checked_environment import CheckedEnvironment
from unirl.loop.episodes import generate_episodes
from unirl.loop.parts import Parts, generate
from unirl.loop.requests import step_requests
from unirl.loop.saved_samples import read_samples
from unirl.numerics.tokens.replay import replay_text
from unirl.quickstart import tools_checkpoint_path, tools_prompts_path

WORDS = ("data.prompts_per_step=3", "data.samples_per_prompt=4", "run.threads=1", "~tracker.report", "data.eval=''")


@dataclass
class Talk:
    """Says `told` after each answer, and ends each episode after as many as its number of turns says."""

    told: Callable[[str, int], str] = lambda answer, turn: f"{answer}?"
    num_turns: Callable[[str], int] = lambda sample: 100
    reward: float = 0.0
    start: str = ""
    seeds: list[int] = field(default_factory=lambda: list[int]())
    asked: list[dict[str, str]] = field(default_factory=lambda: list[dict[str, str]]())

    def reset(
        self, inputs: Inputs, metadata: Sequence[Mapping[str, Any]], *, seeds: Sequence[int]
    ) -> Sequence[Observation]:
        self.seeds, self.asked = list(seeds), []
        return [Observation(text=self.start and f"{self.start} {seed}") for seed in seeds]

    def step(self, answers: Mapping[str, str]) -> Mapping[str, Observation]:
        turn = len(self.asked)
        self.asked.append(dict(answers))
        return {
            sample: Observation(
                text=self.told(answer, turn), reward=self.reward, done=turn + 1 >= self.num_turns(sample)
            )
            for sample, answer in answers.items()
        }

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def parts() -> Parts:
    return build_parts(planned(), catalog=catalog())


def planned(*words: str) -> Plan:
    return compose("quickstart-tools", [*WORDS, *words], catalog=catalog())


def requested(parts: Parts, plan: Plan) -> Request:
    prompts = read_prompts(tools_prompts_path("train"))[: plan.data.prompts_per_step]
    return step_requests(parts, plan, prompts, step=1)[plan.only.name]


def episodes(parts: Parts, talk: Any, *words: str, rows: Sequence[int] | None = None) -> Track:
    plan = planned(*words)
    stage, request = plan.only, requested(parts, plan)
    assert stage.environment is not None
    return generate_episodes(
        request if rows is None else request.select(rows),
        stage=stage,
        model=parts.only.model,
        environment=CheckedEnvironment(talk, choice=stage.environment),
        generate=partial(generate, parts.only.engine),
    )


def plain(values: torch.Tensor) -> list[Any]:
    return values.tolist()  # type: ignore[no-any-return]


def test_an_episode_is_one_sequence_that_scores_as_it_was_sampled(parts: Parts) -> None:
    """The tokens of all answers and observations, read in one forward, give each answer the log-probs that it was
    sampled with, a turn a call of the engine; observations have no log-prob and are not trained on."""
    track = episodes(parts, Talk(num_turns=lambda sample: 1 + int(sample[-1])), "environment.max_turns=4")
    segment = track.text
    assert segment.mask is not None and segment.log_probs is not None and track.turns is not None
    with torch.no_grad():
        replayed = replay_text(text_model(parts.only.model), track, packing=False)
    for row in range(track.num_rows):
        mask, length = segment.mask[row], len(segment.tokens[row])
        assert track.turns[row][0].stage == "text" and (track.sample_ids[row][-1] == "0") <= bool(mask.all())
        # fp32 rounding of a cached forward against a whole one, over log-probs of up to ten nats.
        torch.testing.assert_close(
            replayed.log_probs[row, :length][mask], segment.log_probs[row][mask], rtol=0, atol=1e-4
        )
        assert plain(replayed.valid[row, :length]) == plain(mask)
        assert plain(segment.log_probs[row][~mask]) == [0.0] * int((~mask).sum())


def test_tokens_are_those_of_the_chat_template(parts: Parts) -> None:
    """Prompt, answers and observations together are the conversation as the tokenizer renders it, independently."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tools_checkpoint_path(), local_files_only=True)
    talk = Talk(told=lambda answer, turn: f"result {turn}", num_turns=lambda sample: 3)
    track = episodes(parts, talk)
    assert track.turns is not None
    roles = {"text": "assistant", "environment": "tool"}
    checked = 0
    for row, turns in enumerate(track.turns):
        if track.status[row] is not Status.COMPLETED:
            continue
        answers = [turn for turn in turns if turn.stage == "text"]
        assert [turn.text for turn in turns if turn.stage == "environment"] == ["result 0", "result 1", "result 2"]
        messages = [{"role": "user", "content": track.inputs.prompts[row]}]
        messages += [{"role": roles[turn.stage], "content": turn.text} for turn in turns[:-1]]
        rendered = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        whole = [*plain(track.text.prompt_tokens[row]), *plain(track.text.tokens[row])]
        # The template ends with a newline behind the last answer, which the model does not write.
        assert whole == rendered[: len(whole)] and tokenizer.decode(rendered[len(whole) :]) == "\n"
        assert track.media is not None and track.media.texts[row] == answers[-1].text
        checked += 1
    assert checked > 6


def test_the_first_answer_is_that_of_generation_without_an_environment(parts: Parts) -> None:
    request = requested(parts, planned())
    alone = generate(parts.only.engine, request).text
    track = episodes(parts, Talk(num_turns=lambda sample: 1))
    assert track.text.log_probs is not None and alone.log_probs is not None
    for row in range(track.num_rows):
        assert torch.equal(track.text.tokens[row], alone.tokens[row])
        assert torch.equal(track.text.log_probs[row], alone.log_probs[row])


def test_an_episode_does_not_depend_on_those_beside_it(parts: Parts) -> None:
    """Its draws are its own in every turn; log-probs differ by the rounding of another batch alone."""
    whole = episodes(parts, Talk(num_turns=lambda sample: 1 + int(sample[-1])))
    part = episodes(parts, Talk(num_turns=lambda sample: 1 + int(sample[-1])), rows=[7, 2])
    for row, other in enumerate([7, 2]):
        assert part.sample_ids[row] == whole.sample_ids[other]
        assert torch.equal(part.text.tokens[row], whole.text.tokens[other])
        assert part.turns is not None and whole.turns is not None and part.turns[row] == whole.turns[other]


def test_finished_episodes_are_not_stepped(parts: Parts) -> None:
    talk = Talk(num_turns=lambda sample: 1 + int(sample[-1]))
    track = episodes(parts, talk, "environment.max_turns=3")
    for turn, answers in enumerate(talk.asked):
        # An episode of n turns answers n times, unless an answer was cut off before.
        assert {int(sample[-1]) for sample in answers} <= set(range(turn, 4))
    done = [track.status[row] for row in range(track.num_rows) if track.sample_ids[row][-1] == "3"]
    assert set(done) == {Status.TRUNCATED}


def test_the_return_is_the_discounted_sum_of_the_rewards(parts: Parts) -> None:
    talk = Talk(num_turns=lambda sample: 3, reward=0.5)
    track = episodes(parts, talk, "environment.discount=0.5", "environment.max_turns=3")
    turns = track.reward_parts["environment/turns"]
    for row, value in enumerate(plain(track.reward_parts["environment"])):
        complete = int(turns[row]) - (track.status[row] is not Status.COMPLETED)
        assert value == sum(0.5**turn * 0.5 for turn in range(complete))
    assert plain(track.reward_parts["environment"]).count(0.5 + 0.25 + 0.125) > 6
    assert track.reward_weights == {"environment": 1.0}


@pytest.mark.parametrize("budget", [3, 9, 20, 40])
def test_a_budget_of_tokens_ends_an_episode_at_its_own_length(parts: Parts, budget: int) -> None:
    """With less room the tokens are the same, up to where the room ends."""
    free = episodes(parts, Talk(), "environment.max_turns=4")
    track = episodes(parts, Talk(), "environment.max_turns=4", f"environment.max_tokens={budget}")
    assert free.turns is not None and track.turns is not None and track.text.mask is not None
    for row in range(track.num_rows):
        tokens, whole = plain(track.text.tokens[row]), plain(free.text.tokens[row])
        assert tokens == whole[: len(tokens)] and len(tokens) <= budget
        assert track.status[row] is Status.TRUNCATED
        # Never an observation last: there is nothing that it would be read for.
        assert bool(track.text.mask[row][-1])
        last = [turn for turn in track.turns[row] if turn.stage == "text"][-1].text
        assert track.media is not None and track.media.texts[row] == last


def test_samples_of_a_group_start_alike_unless_told_otherwise(parts: Parts) -> None:
    talk = Talk(start="board", num_turns=lambda sample: 1)
    track = episodes(parts, talk)
    assert [len(set(talk.seeds[at : at + 4])) for at in (0, 4, 8)] == [1, 1, 1] and len(set(talk.seeds)) == 3
    model = text_model(parts.only.model)
    for row, tokens in enumerate(track.text.prompt_tokens):
        assert f"{track.inputs.prompts[row]}\n\nboard {talk.seeds[row]}" in model.texts([tokens])[0]
    assert track.parent_ids == requested(parts, planned()).inputs.ids
    episodes(parts, talk, "environment.same_start=false")
    assert len(set(talk.seeds)) == 12


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("engine=dataset",), "environment: got 'calculator', but engine 'dataset' reads stored texts"),
        (("+reward@reward.environment=exact-match",), "reward.environment: the return of environment has this name"),
        (("environment.discount=1.5",), "environment.discount: got 1.5"),
        (("environment.max_turns=0",), "environment.max_turns: got 0"),
        (("environment.opens=' '",), "environment.opens: got ' ', expected a marker such as '<calc>'."),
        (
            ("algorithm=dapo", "algorithm.overlong_buffer=4", "algorithm.max_length=${sampling.max_new_tokens}"),
            "algorithm.overlong_buffer: got 4, a penalty on the length of one completion, with environment",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: Sequence[str], expected: str) -> None:
    reasons = [str(reason) for reason in match(planned(*words), catalog=catalog()).reasons]
    assert any(reason.startswith(expected) for reason in reasons), reasons


def test_a_recipe_without_rewards_trains_on_the_return() -> None:
    assert match(planned("~reward.math"), catalog=catalog()).accepted
    refused = [str(r) for r in match(planned("~reward.math", "environment=null"), catalog=catalog()).reasons]
    assert any(reason.startswith("reward: no reward was chosen") for reason in refused)


SMALL = (
    *("data.prompts_per_step=4", "data.samples_per_prompt=4", "data.eval=''", "run.keep=0", "run.threads=1"),
    *("advantage.constant_reward=skip", "environment.max_turns=3", "environment.call_reward=0.25"),
    "~tracker.report",
)


@pytest.mark.slow
def test_two_steps_and_two_after_a_resume_equal_four(tmp_path: Path) -> None:
    """With the grid, whose boards are drawn: their seeds come from the run's seed, the step and the prompt alone."""
    grid = ("environment=grid", "environment.size=2", "environment.holes=0", "environment.step_reward=-0.1")
    words = ("run.max_steps=4", "run.save_every=2", *grid)
    small = [word for word in SMALL if "call_reward" not in word]
    whole = run(tmp_path / "whole", *words, recipe="quickstart-tools", small=small)
    resumed = run(
        tmp_path,
        "run.max_steps=4",
        resume=copy_up_to(whole.folder, 2, tmp_path / "parts"),
        recipe="quickstart-tools",
        small=(*small, *words),
    )
    assert tensors(resumed.folder, 4).keys() == tensors(whole.folder, 4).keys()
    for name, value in tensors(resumed.folder, 4).items():
        assert torch.equal(value, tensors(whole.folder, 4)[name]), name
    for step in (3, 4):
        assert steps(resumed.folder)[step]["reward_mean"] == steps(whole.folder)[step]["reward_mean"]


@pytest.mark.slow
def test_a_run_shows_the_turns_of_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run.max_steps=1", "run.media_every=1")
    small = [word for word in SMALL if word != "~tracker.report"]
    folder = run(tmp_path / "run", *words, recipe="quickstart-tools", small=small).folder
    saved = read_samples(folder, 0)["text"].track
    assert saved.turns is not None and saved.rewards is not None
    row = next(row for row, turns in enumerate(saved.turns) if len(turns) > 2)
    asked, told, *_ = saved.turns[row]
    with pytest.raises(SystemExit) as caught:
        main(["show", str(folder), "--sample", saved.sample_ids[row]])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"  text\n    {asked.text}\n  environment\n    {told.text}\n" in text and "masked" in text
    page = (folder / "report.html").read_text()
    assert html.escape(f"{asked.text}\n> {told.text}") in page
    parts = saved.reward_parts
    assert torch.equal(saved.rewards, parts["math"] + parts["environment"])
    assert float(parts["environment"].max()) == 0.25 * round(float(parts["environment"].max()) / 0.25) > 0


@pytest.mark.slow
def test_an_environment_that_hangs_ends_the_run_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text("import threading\n\n\ndef reply(answer):\n    threading.Event().wait()\n")
    words = ("environment=function", f"environment.target={file}:reply", "environment.timeout_s=0.5")
    small = [word for word in SMALL if "call_reward" not in word]
    with pytest.raises(RunFailed) as caught:
        run(tmp_path / "run", *words, recipe="quickstart-tools", small=small)
    expected = "environment: 'function': step() took longer than 0.5 s in turn 0, for sample 'r0/"
    assert str(caught.value).startswith(expected)


def test_a_prompt_without_what_an_environment_reads_is_refused(tmp_path: Path) -> None:
    """Before anything is built."""
    plan = planned("environment=calculator")
    stage = plan.only
    assert stage.environment is not None
    spec = dataclasses.replace(stage.environment.spec, metadata=("tool",))
    choice = dataclasses.replace(stage.environment, spec=spec)
    plan = plan.with_stages(lambda stage: dataclasses.replace(stage, environment=choice))
    with pytest.raises(
        DataError, match=r"got no metadata 'tool', which environment reads; the prompt has \['answer'\]"
    ):
        read_data(plan)


def test_an_observation_follows_as_the_template_has_it_or_as_it_is(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = parts.only.model
    sampling: Any = planned().only.sampling
    end, letter = model.tokenizer("<|im_end|>")["input_ids"], model.tokenizer("7")["input_ids"]

    def text(completion: list[int], **settings: Any) -> str:
        (row,) = model.observation_tokens(
            ["5"], after=[torch.tensor(completion)], role="tool", sampling=dataclasses.replace(sampling, **settings)
        )
        return model.tokenizer.decode(row)

    # A completion that a stop string or another stop token ended has no end of its message yet.
    message = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert text([*letter, *end]) == message
    assert text(letter) == "<|im_end|>" + message
    assert text([*letter, *end], thinking=False) == message + "<think>\n\n</think>\n\n"
    assert text([*letter, *end], chat=False) == "5"
    without = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", without)
    with pytest.raises(RecipeError, match=r"environment.role: got 'tool', but the checkpoint's chat template leaves"):
        text(letter)
