"""A plan of two stages on the quickstarts' checkpoints: a painter draws a prompt, and a reader names what it sees."""

from __future__ import annotations

__all__ = ["RECIPE"]

RECIPE = """
defaults:
  - /unirl
  - /model@model.painter: sd3
  - /model@model.reader: qwen3-vl
  - /backend@backend.painter: fsdp2
  - /engine@engine.image: trainside
  - /engine@engine.answer: trainside
  - /algorithm@algorithm.image: flow-grpo
  - /sampling@sampling.image: latent
  - /sampling@sampling.answer: text
  - /reward@reward.name: function
  - _self_
stages:
  image: {model: painter, samples: 2}
  answer: {model: reader, parent: image, samples: 2, credit: mean, instruction: "What is it?"}
model:
  painter: {path: "${asset:quickstart,checkpoint}"}
  reader: {path: "${asset:quickstart,vl/checkpoint}"}
backend: {painter: {trains: full}}
data:
  train: "${asset:quickstart,prompts/train.jsonl}"
  eval: "${asset:quickstart,prompts/heldout.jsonl}"
  prompts_per_step: 2
sampling:
  image: {num_inference_steps: 3, height: 64, width: 64, max_sequence_length: 8, sde: {mode: fraction, last: 0.7}}
  answer: {max_new_tokens: 4}
reward: {name: {target: "unirl.quickstart.naming:color_and_shape", stage: answer}}
eval: {every: 0, num_prompts: 2}
run: {max_steps: 2, save_every: 1, media_every: 0, threads: 1}
"""
