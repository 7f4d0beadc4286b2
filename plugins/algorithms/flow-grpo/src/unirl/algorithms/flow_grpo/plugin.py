"""What this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.capability import Needs
from unirl.core.hookspec import hookimpl
from unirl.core.kl import kl_reasons
from unirl.core.plan import Plan
from unirl.core.spec import AlgorithmSpec

FLOW_GRPO = AlgorithmSpec(
    name="flow-grpo",
    summary="Clipped policy gradient over the SDE steps of a flow model, with group advantages",
    build="unirl.algorithms.flow_grpo.algorithm:build",
    config="unirl.algorithms.flow_grpo.config:FlowGrpoConfig",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True, staleness="ratio"),
    # Ratio norm compares means, which are replayed with the weights that train.
    when={"kl_coef": Needs(reference="policy"), "ratio_norm": Needs(staleness="none")},
    stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
    clip_key="clip_range",
    paper="arXiv 2505.05470",
    reference="unirl.algorithms.flow_grpo.reference:loss",
    # The default suits latents of 65,536 elements; those of miniatures are a thousandth of it.
    trial={"clip_range": 1e-3},
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [FLOW_GRPO]


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[str]:
    """The settings that only this algorithm has."""
    if plan.algorithm.spec is not FLOW_GRPO:
        return []
    from unirl.algorithms.flow_grpo.config import FlowGrpoConfig
    from unirl.core.config import LatentSamplingConfig

    config = plan.algorithm.config
    assert isinstance(config, FlowGrpoConfig)
    reasons: list[str] = []
    if not 0 < config.clip_range < 1:
        reasons.append(f"algorithm.clip_range: {config.clip_range} was asked for; it must lie between 0 and 1.")
    if config.clip_range_high is not None and config.clip_range_high <= 0:
        reasons.append(f"algorithm.clip_range_high: {config.clip_range_high} was asked for; it must be above 0.")
    reasons += kl_reasons(config, plan)
    for key, value, known in (
        ("clip_schedule", config.clip_schedule, ("constant", "linear", "cosine")),
        ("step_weight", config.step_weight, ("uniform", "inverse-dt", "noise")),
        ("kl_form", config.kl_form, ("gaussian", "flow-grpo-code")),
    ):
        if value not in known:
            reasons.append(f"algorithm.{key}: {value!r} was asked for; it is one of {', '.join(known)}.")
    for name, sampling in plan.sampling.items():
        if not isinstance(sampling, LatentSamplingConfig):
            continue
        without_constants = sampling.kernel == "cps" and sampling.kernel_options.get("constants") is False
        if without_constants and (config.ratio_norm or config.kl_coef):
            reasons.append(
                f"sampling.kernel_options.constants: track {name!r} drops the constants of the log-prob, "
                "which ratio_norm and kl_coef divide by; set it to true or turn those off."
            )
    return reasons
