# diffusers exports its classes lazily, and flow_grpo's files are not part of this project.
# pyright: reportPrivateImportUsage=false, reportMissingImports=false
"""The round of `sd3_round.py` with flow_grpo's sampler and log-probs, and the inner loop of its `train_sd3.py`.

    python benchmarks/gpu/train_flow_grpo.py FOLDER --theirs FOLDER --out FILE [--tiny]

`--theirs` holds two files of https://github.com/yifan123/flow_grpo (MIT), from `flow_grpo/diffusers_patch/`:
`sd3_pipeline_with_logprob.py` and `sd3_sde_with_logprob.py`, in a folder `flow_grpo`; their imports of each other are
relative. They are not kept here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from measure import DEVICE
from sd3_round import DTYPE, ROUND, TINY, Sd3Round, adapted_transformer, adapters, conditions, timed_rounds, update
from torch import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--theirs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(options.theirs))
    shape = TINY if options.tiny else ROUND
    # As its train_sd3.py sets it.
    torch.backends.cuda.matmul.allow_tf32 = True
    loop = FlowGrpoLoop(options.folder, shape)
    note = "flow_grpo's sampler and log-probs; every step is stochastic, the same three are trained"
    timed_rounds(loop.generate, loop.train, shape=shape, out=options.out, note=note)


class FlowGrpoLoop:
    def __init__(self, folder: Path, shape: Sd3Round) -> None:
        self.shape = shape
        net = adapted_transformer(folder)
        self.pipeline = StableDiffusion3Pipeline.from_pretrained(
            folder, transformer=net, torch_dtype=DTYPE, trust_remote_code=False
        ).to(DEVICE)
        self.pipeline.vae.float()
        self.pipeline.set_progress_bar_config(disable=True)
        self.net, self.params = net, adapters(net)
        self.adam = torch.optim.AdamW(self.params, lr=shape.learning_rate, weight_decay=1e-4)
        self.prompts, self.pooled = conditions(net, shape.forward_batch, shape.tokens)
        self.latents = torch.empty(0)
        """[samples, steps + 1, 16, H, W]."""

    def generate(self) -> Mapping[int, Tensor]:
        from flow_grpo.sd3_pipeline_with_logprob import pipeline_with_logprob

        latents: list[Tensor] = []
        log_probs: list[Tensor] = []
        for _ in range(0, self.shape.samples, self.shape.forward_batch):
            # Accelerate wraps the transformer in autocast.
            with torch.no_grad(), torch.autocast(DEVICE, dtype=DTYPE):
                images, path, scores = pipeline_with_logprob(
                    self.pipeline,
                    prompt_embeds=self.prompts,
                    pooled_prompt_embeds=self.pooled,
                    negative_prompt_embeds=self.prompts,
                    negative_pooled_prompt_embeds=self.pooled,
                    num_inference_steps=self.shape.num_steps,
                    guidance_scale=1.0,
                    output_type="pt",
                    height=self.shape.pixels,
                    width=self.shape.pixels,
                    noise_level=self.shape.noise_level,
                )
            images.cpu()
            latents.append(torch.stack(path, dim=1))
            log_probs.append(torch.stack(scores, dim=1))
        self.latents = torch.cat(latents)
        scored = torch.cat(log_probs)
        return {step: scored[:, step] for step in self.shape.trained_steps}

    def train(self, old: Mapping[int, Tensor]) -> float:
        mismatches = [
            update(self.log_prob, old, self.adam, self.params, shape=self.shape, number=number)
            for number in range(self.shape.updates)
        ]
        return mismatches[0]

    def log_prob(self, rows: slice, step: int) -> Tensor:
        from flow_grpo.sd3_sde_with_logprob import sde_step_with_logprob

        before, after = self.latents[rows, step], self.latents[rows, step + 1]
        count = len(before)
        timestep = self.pipeline.scheduler.timesteps[step].expand(count)
        with torch.autocast(DEVICE, dtype=DTYPE):
            velocity = self.net(
                hidden_states=before,
                timestep=timestep,
                encoder_hidden_states=self.prompts[:count],
                pooled_projections=self.pooled[:count],
                return_dict=False,
            )[0]
        noise = {"noise_level": self.shape.noise_level}
        result = sde_step_with_logprob(
            self.pipeline.scheduler, velocity.float(), timestep, before.float(), prev_sample=after.float(), **noise
        )
        return result[1]


if __name__ == "__main__":
    main()
