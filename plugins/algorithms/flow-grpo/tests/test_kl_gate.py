"""A KL penalty on the most uncertain samples: from rewards to the loss, in micro-batches, and where it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.config import DdpoConfig, FlowGrpoConfig
from unirl.algorithms.flow_grpo.ddpo import Ddpo
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Replayed
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

STEPS, STD = 2, 0.5
SHIFTS = (0.1, 0.2, 0.3, 0.4)
"""Distance of a sample's means from those of the reference, in every element and step."""
KLS = [shift**2 / (2 * STD**2) for shift in SHIFTS]
# The second sample is the one that the trained reward alone puts first.
TRAINED, WATCHED = [2.0, 4.0, 3.0, 1.0], [30.0, 10.0, 40.0, 20.0]
WEIGHTS = {"trained": 1.0, "watched": 0.0}
SETTINGS = {"kl_coef": 0.5, "kl_gate": 0.25}


def make_track() -> Track:
    rows = len(TRAINED)
    parts = {"trained": torch.tensor(TRAINED), "watched": torch.tensor(WATCHED)}
    return Track(
        name="image",
        sample_ids=tuple(f"p/{row}" for row in range(rows)),
        group_ids=("p",) * rows,
        inputs=Inputs.of_texts(("p",) * rows),
        metadata=({},) * rows,
        segment=LatentSegment(
            latents=torch.zeros(rows, STEPS + 1, 2),
            positions=torch.arange(STEPS + 1).repeat(rows, 1),
            sde_steps=torch.arange(STEPS).repeat(rows, 1),
            log_probs=torch.zeros(rows, STEPS),
            sigmas=torch.linspace(1, 0, STEPS + 1),
            sampler=Sampler(kernel="flow-sde", eta=0.7),
        ),
        rewards=parts["trained"],
        reward_parts=parts,
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


def replay(track: Track, *, policy: str = "live") -> Replayed:
    """Means that are apart by the shift of the sample in the last place of its id; every ratio is 1."""
    shifts = torch.tensor([SHIFTS[int(sample[-1])] for sample in track.sample_ids])
    steps = track.latent.scored_steps.shape[1]
    means = torch.zeros(track.num_rows, steps, 2) + (shifts[:, None, None] if policy == "live" else 0.0)
    wide = torch.full((track.num_rows, steps, 1), STD)
    valid = torch.ones(track.num_rows, steps, dtype=torch.bool)
    return Replayed(
        log_probs=torch.zeros(track.num_rows, steps), means=means, std=wide, g=wide, next=means, valid=valid
    )


def make(kind: type[FlowGrpo] = FlowGrpo, *, advantage: AdvantageConfig | None = None, **settings: float) -> FlowGrpo:
    config = DdpoConfig if kind is Ddpo else FlowGrpoConfig
    return kind(
        config(**{**SETTINGS, **settings}),  # type: ignore[arg-type]
        advantage=advantage or AdvantageConfig(),
        reward_weights=WEIGHTS,
        train=TrainConfig(),
    )


def kl_of(algorithm: FlowGrpo, tracks: Sequence[Track]) -> tuple[float, float]:
    """The KL penalty of these micro-batches, and the metric."""
    announced = [weight_totals(algorithm.loss_weights(track))["kl"] for track in tracks]
    totals, penalty, total, weight = {"kl": torch.stack(announced).sum()}, 0.0, 0.0, 0.0
    for track in tracks:
        losses = algorithm.loss(track, replay, progress=0.0)  # type: ignore[arg-type]
        terms = [term for term in losses.terms if term.name == "kl"]
        penalty += float(reduce_terms(terms, totals=totals))
        total, weight = total + float(losses.metrics["kl"].total), weight + float(losses.metrics["kl"].weight)
    return penalty, total / weight


@pytest.mark.parametrize("kind", [FlowGrpo, Ddpo])
def test_the_penalty_is_the_kl_of_the_gated_samples_over_the_number_of_all(kind: type[FlowGrpo]) -> None:
    algorithm = make(kind)
    track, _ = algorithm.advantages(make_track())
    assert track.kl_weights is not None and track.kl_weights.tolist() == [0, 1, 0, 0]
    whole, pieces = [track], algorithm.pieces(track)
    padded = track.select([3, 2, 1]).padded(4)
    for split in (whole, pieces, track.chunks(1), track.chunks(3), [padded, track.select([0])]):
        penalty, kl = kl_of(algorithm, split)
        # fp32
        assert penalty == pytest.approx(0.5 * KLS[1] / 4, rel=1e-6)
        assert kl == pytest.approx(sum(KLS) / 4, rel=1e-6), "the log has the mean over all samples"


def test_a_share_of_1_is_the_penalty_without_a_gate_bit_for_bit() -> None:
    track, _ = make(kl_gate=1.0).advantages(make_track())
    assert track.kl_weights is None
    everyone = dataclasses.replace(track, kl_weights=torch.ones(4))
    assert kl_of(make(), [track]) == kl_of(make(), [everyone])
    assert kl_of(make(), [track])[0] == pytest.approx(0.5 * sum(KLS) / 4, rel=1e-6)  # fp32


def test_the_gate_is_that_of_the_whole_group_where_training_takes_a_part_of_it() -> None:
    """The best is the second sample, which is gated; the worst is the last."""
    algorithm = make(advantage=AdvantageConfig(keep_best=1, keep_worst=1))
    track, _ = algorithm.advantages(make_track())
    assert track.sample_ids == ("p/1", "p/3")
    assert track.kl_weights is not None and track.kl_weights.tolist() == [1, 0]
    assert kl_of(algorithm, [track])[0] == pytest.approx(0.5 * KLS[1] / 2, rel=1e-6)  # fp32


KL = ("algorithm.kl_coef=0.04", "backend.reference_copy=true")
WATCH = ("+reward@reward.size=jpeg-size", "reward.size.weight=0")
GATE = "algorithm.kl_gate=0.1"


def reasons(*overrides: str) -> list[str]:
    catalog = Catalog.discover()
    return [str(reason) for reason in match(compose("quickstart", overrides, catalog=catalog), catalog=catalog).reasons]


def test_a_gate_takes_a_penalty_and_two_rewards() -> None:
    assert reasons(*KL, *WATCH, GATE) == []
    assert reasons("algorithm=ddpo", "algorithm.min_count=1", *KL, *WATCH, GATE) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((*WATCH, GATE), "algorithm.kl_gate: got 0.1, but there is no KL penalty: algorithm.kl_coef is 0. Set it"),
        ((*KL, GATE), "algorithm.kl_gate: got 0.1, which compares two rewards or more, and there is 1. Add"),
        ((*KL, *WATCH, "algorithm.kl_gate=0"), "algorithm.kl_gate: got 0.0, expected more than 0 and at most 1."),
        ((*KL, *WATCH, "algorithm.kl_gate=1.5"), "algorithm.kl_gate: got 1.5, expected more than 0 and at most 1."),
        (
            (*KL, *WATCH, GATE, "data.samples_per_prompt=1", "advantage.center=global", "advantage.scope=global"),
            "algorithm.kl_gate: got 0.1, which ranks the samples of a group, and each group has one. Draw more",
        ),
    ],
)
def test_a_gate_that_cannot_work_is_refused_at_compose(overrides: tuple[str, ...], says: str) -> None:
    (reason,) = reasons(*overrides)
    assert reason.startswith(says)
