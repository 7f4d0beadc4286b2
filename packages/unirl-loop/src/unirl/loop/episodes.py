"""Episodes: a text track whose samples are conversations with an environment, one call of the engine a turn.

A sample is one sequence: the answers with the tokens and log-probs that the engine sampled, and between them the
observations, which are tokenized once, masked, and never trained on. The reward of an episode is its return,
sum_t discount^t reward_t over its turns t = 0, 1, ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from unirl.core.roles import text_model
from unirl.core.roles.environment import RETURN
from unirl.core.types.array import Array
from unirl.core.types.inputs import Turn
from unirl.core.types.media import Media
from unirl.core.types.track import Status, TextSegment

from .requests import sample_seed, with_inputs

if TYPE_CHECKING:
    from unirl.core.roles import Model, TextModel
    from unirl.core.specs.part_config import EnvironmentConfig
    from unirl.core.specs.plan import Stage
    from unirl.core.types.request import Request
    from unirl.core.types.track import Track

    from .checked_environment import CheckedEnvironment

__all__ = ["generate_episodes"]


@dataclass(kw_only=True)
class _Episode:
    """What one sample has so far."""

    tokens: list[Array] = field(default_factory=lambda: list[Array]())
    """Answers and observations in turn."""
    log_probs: list[Array] = field(default_factory=lambda: list[Array]())
    """Of each of `tokens`; 0 for observations. Empty if the engine gives none."""
    turns: list[Turn] = field(default_factory=lambda: list[Turn]())
    reward: float = 0.0
    """Discounted sum so far."""
    num_answers: int = 0
    status: Status | None = None
    """None while it goes on."""

    @property
    def length(self) -> int:
        return sum(len(piece) for piece in self.tokens)

    def add(self, turn: Turn, tokens: Array, log_probs: Array | None) -> None:
        self.turns.append(turn)
        self.tokens.append(tokens)
        if log_probs is not None:
            self.log_probs.append(log_probs)


def generate_episodes(
    request: Request,
    *,
    stage: Stage,
    model: Model,
    environment: CheckedEnvironment,
    generate: Callable[[Request], Track],
) -> Track:
    """The track of a request, each sample an episode. All that go on take their turn in one call of the engine.

    generate: gives the track of a request, its echo verified.
    Raises RunFailed in the name of the environment, see `CheckedEnvironment`.
    """
    config = environment.config
    speaker, sampling = text_model(model), request.text.sampling
    parents, request = request.inputs.ids, _started(request, environment, stage=stage, model=speaker)
    episodes = [_Episode() for _ in range(request.num_rows)]
    prompts, first = request.text.prompt_tokens, cast("Track | None", None)
    for turn in range(config.max_turns):
        live = [row for row, episode in enumerate(episodes) if episode.status is None]
        if not live:
            break
        track = generate(_next_turn(request, episodes, live, turn=turn, config=config))
        first = first or track
        answers: dict[int, str] = {}
        for row, answer in zip(live, _answers(track, speaker, episodes, live, config=config, stage=stage), strict=True):
            if episodes[row].status is None:
                answers[row] = answer
        asked = {request.sample_ids[row]: answer for row, answer in answers.items()}
        told = environment.step(asked) if asked else {}
        going: list[int] = []
        for row in answers:
            episode, observation = episodes[row], told[request.sample_ids[row]]
            episode.reward += config.discount**turn * observation.reward
            if observation.done or turn + 1 == config.max_turns:
                episode.status = Status.COMPLETED if observation.done else Status.TRUNCATED
                if observation.text:
                    episode.turns.append(Turn(stage=RETURN, text=observation.text))
            else:
                going.append(row)
        if going:
            texts = [told[request.sample_ids[row]].text for row in going]
            after = [episodes[row].tokens[-1] for row in going]
            rows = speaker.observation_tokens(texts, after=after, role=config.role, sampling=sampling)
            for row, text, tokens in zip(going, texts, rows, strict=True):
                _observe(episodes[row], text, tokens, config=config)
    assert first is not None, "a request has rows, and an episode a turn"
    track = _track(first, episodes, prompts=prompts, weight=config.weight)
    return dataclasses.replace(track, parent_ids=parents)


def _started(request: Request, environment: CheckedEnvironment, *, stage: Stage, model: TextModel) -> Request:
    """The request with the first observations behind the prompts, in one message."""
    of = request.group_ids if environment.config.same_start else request.sample_ids
    seeds = [sample_seed(seed=request.seed, rollout=request.rollout, sample_id=name) for name in of]
    # Its ids name the episodes.
    named = dataclasses.replace(request.inputs, ids=request.sample_ids)
    texts = [one.text for one in environment.reset(named, request.metadata, seeds=seeds)]
    if not any(texts):
        return request
    joined = tuple("\n\n".join(filter(None, pair)) for pair in zip(request.inputs.texts, texts, strict=True))
    return with_inputs(request, dataclasses.replace(named, texts=joined), model=model, track=stage.track)


def _next_turn(
    request: Request, episodes: Sequence[_Episode], live: Sequence[int], *, turn: int, config: EnvironmentConfig
) -> Request:
    """The request of a turn: the prompts of these rows with all that came after them.

    The first turn has the seeds of the samples, as without an environment.
    """
    import torch

    part = request.select(live)
    params = part.text
    if config.max_tokens:
        room = max(config.max_tokens - episodes[row].length for row in live)
        limit = min(params.sampling.max_new_tokens, room)
        params = dataclasses.replace(params, sampling=dataclasses.replace(params.sampling, max_new_tokens=limit))
    if turn:
        prompts = tuple(torch.cat([request.text.prompt_tokens[row], *episodes[row].tokens]) for row in live)
        names = [f"{sample}/turn-{turn}" for sample in part.sample_ids]
        seeds = tuple(sample_seed(seed=request.seed, rollout=request.rollout, sample_id=name) for name in names)
        params = dataclasses.replace(params, prompt_tokens=prompts, seeds=seeds)
    return dataclasses.replace(part, params=params)


def _answers(
    track: Track,
    model: TextModel,
    episodes: Sequence[_Episode],
    live: Sequence[int],
    *,
    config: EnvironmentConfig,
    stage: Stage,
) -> list[str]:
    """The texts of a turn, which its rows get. One that a limit of tokens cut off ends its episode."""
    segment, texts = track.text, list(cast("Media", track.media).texts)
    for place, row in enumerate(live):
        episode, tokens = episodes[row], segment.tokens[place]
        log_probs = None if segment.log_probs is None else segment.log_probs[place]
        status = track.status[place]
        room = config.max_tokens - episode.length
        # The limit of the call was that of the row with the most room.
        if config.max_tokens and len(tokens) > room:
            tokens, log_probs, status = tokens[:room], None if log_probs is None else log_probs[:room], Status.TRUNCATED
            (texts[place],) = model.texts([tokens])
        episode.add(Turn(stage=stage.name, text=texts[place]), tokens, log_probs)
        episode.num_answers += 1
        if status is not Status.COMPLETED:
            episode.status = status
    return texts


def _observe(episode: _Episode, text: str, tokens: Array, *, config: EnvironmentConfig) -> None:
    """Add an observation, or end the episode if nothing could follow it."""
    turn = Turn(stage=RETURN, text=text)
    if config.max_tokens and episode.length + len(tokens) >= config.max_tokens:
        episode.status = Status.TRUNCATED
        episode.turns.append(turn)
        return
    episode.add(turn, tokens, tokens.new_zeros(len(tokens)).float() if episode.log_probs else None)


def _track(first: Track, episodes: Sequence[_Episode], *, prompts: tuple[Array, ...], weight: float) -> Track:
    """The track of whole episodes. first: that of their first answers."""
    import torch

    has_log_probs = first.text.log_probs is not None
    segment = TextSegment(
        prompt_tokens=prompts,
        tokens=tuple(torch.cat(episode.tokens) for episode in episodes),
        log_probs=tuple(torch.cat(episode.log_probs) for episode in episodes) if has_log_probs else None,
        # Answers and observations in turn, an answer first.
        mask=tuple(
            torch.cat([torch.full((len(one),), not place % 2) for place, one in enumerate(episode.tokens)])
            for episode in episodes
        ),
        temperature=first.text.temperature,
        options=first.text.options,
    )
    last = [next(turn.text for turn in reversed(episode.turns) if turn.stage != RETURN) for episode in episodes]
    return dataclasses.replace(
        first,
        segment=segment,
        media=Media(kind="text", values=tuple(last)),
        turns=tuple(tuple(episode.turns) for episode in episodes),
        status=tuple(cast("Status", episode.status) for episode in episodes),
        reward_parts={
            RETURN: torch.tensor([episode.reward for episode in episodes], dtype=torch.float32),
            f"{RETURN}/turns": torch.tensor([float(episode.num_answers) for episode in episodes]),
        },
        reward_weights={RETURN: weight},
    )
