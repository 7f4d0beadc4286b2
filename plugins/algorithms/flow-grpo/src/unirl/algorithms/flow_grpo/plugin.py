"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

_REFERENCE = {"kl_coef": Needs(reference="policy")}
_STEP_REWARDS = {"step_rewards": Needs(step_rewards=True)}

FLOW_GRPO = AlgorithmSpec(
    name="flow-grpo",
    summary="Clipped policy gradient over the SDE steps of a flow model, with group advantages",
    build="unirl.algorithms.flow_grpo.algorithm:build",
    config="unirl.algorithms.flow_grpo.config:FlowGrpoConfig",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True, staleness="ratio"),
    # Ratio norm compares means, which are replayed with the weights that train.
    when={**_REFERENCE, **_STEP_REWARDS, "ratio_norm": Needs(staleness="none")},
    stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
    clip_key="clip_range",
    proposes={"sampling.kernel": "flow-sde", "sampling.eta": 0.7, "sampling.sde": {"mode": "all"}},
    paper="arXiv 2505.05470",
    reference="unirl.algorithms.flow_grpo.reference:loss",
    # The default suits latents of 65,536 elements; those of miniatures are a thousandth of it.
    trial={"clip_range": 1e-3},
)
FLOW_DPPO = replace(
    FLOW_GRPO,
    name="flow-dppo",
    summary="Policy gradient over SDE steps, with a mask by the KL to the old policy in place of the clip",
    config="unirl.algorithms.flow_grpo.config:FlowDppoConfig",
    # The divergence, too, is of means that are replayed with the weights that train.
    needs=replace(FLOW_GRPO.needs, staleness="none"),
    when={**_REFERENCE, **_STEP_REWARDS},
    paper="arXiv 2606.11025",
    # At 1,000 elements a KL of 1e-3 is a log-ratio of std 1.4e-3, about as much as the clip range of the others allows.
    trial={"clip_range": 1e-3, "threshold": 1e-3},
)
TEMPFLOW_GRPO = replace(
    FLOW_GRPO,
    name="tempflow-grpo",
    summary="Flow-GRPO with one SDE step in each trajectory, weighted by the noise of that step",
    config="unirl.algorithms.flow_grpo.config:TempFlowConfig",
    proposes={
        **FLOW_GRPO.proposes,
        "sampling.sde": {"mode": "window", "window": 1, "strategy": "random"},
        "sampling.same_initial_noise": True,
    },
    paper="arXiv 2508.04324",
)
DDPO = replace(
    FLOW_GRPO,
    name="ddpo",
    summary="Clipped policy gradient over denoising steps, with advantages from running statistics of each prompt",
    build="unirl.algorithms.flow_grpo.ddpo:build",
    config="unirl.algorithms.flow_grpo.config:DdpoConfig",
    when={key: needs for key, needs in FLOW_GRPO.when.items() if key not in _STEP_REWARDS},
    paper="arXiv 2305.13301",
    # Trials have groups of four and no earlier steps.
    # The 24 samples a prompt of the learning trial are more than the usual buffer holds.
    trial={"clip_range": 1e-3, "min_count": 1, "buffer_size": 64},
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [FLOW_GRPO, FLOW_DPPO, TEMPFLOW_GRPO, DDPO]
