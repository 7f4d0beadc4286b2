"""Trains texts on 2 gloo ranks and leaves the weight updates of rank 0 in FOLDER: `python veomni_exports.py FOLDER`."""

import dataclasses

from unirl.backends.veomni.backend import build
from unirl.backends.veomni.config import MeshConfig, VeomniConfig
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
from unirl.models.causal_lm.config import AutoCausalLmConfig
from unirl.models.causal_lm.model import build as build_text
from unirl.train_host.sections import LoraSettings
from veomni_cases import Reinforce, make_texts
from veomni_worlds import main

NUM_UPDATES = 2


def exports_of(rank, world, folder):
    """Weight updates by checkpoint and `backend.trains`."""
    result = {}
    for name, trains in (("dense", "full"), ("dense", "lora"), ("moe", "full"), ("moe", "lora")):
        print(name, trains, flush=True)
        backend = build(
            VeomniConfig(
                trains=trains,
                lora=LoraSettings(rank=4, alpha=8.0),
                # Updates of Adam that log-probs show.
                lr=1e-2,
                max_grad_norm=None,
                mesh=MeshConfig(expert=world if name == "moe" else 1),
            ),
            model=build_text(AutoCausalLmConfig(path=str(folder / name)), device="cpu", lazy=True),
            train=TrainConfig(micro_batch_size=2),
            steps=10,
            seed=3,
        )
        mine = make_texts().select(list(range(rank, 8, world)))
        for _ in range(NUM_UPDATES):
            backend.train([Job(track=mine, algorithm=Reinforce())], progress=0.0)
        update = backend.export_weights(kind=trains)
        # Gathered tensor by tensor, which all ranks take part in.
        result[name, trains] = dataclasses.replace(update, tensors=dict(update.tensors))
        backend.close()
    return result


if __name__ == "__main__":
    main(exports_of, [2])
