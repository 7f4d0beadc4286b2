"""Roles: what the parts of a run do for each other. A plugin's `build` returns an object that fits its role.

The loop calls nothing else. A model is plain torch and knows nothing of engines or trainers; an engine turns a request
into a track; a backend owns what trains; an algorithm returns loss terms and never runs backward itself.

Models, backends and algorithms inherit their role, for the defaults of optional methods. A class that has every method
that is called on it works without.
"""

from .algorithm import Algorithm, Losses, LossTerm, Metric
from .backend import Backend, Job, TrainReport
from .engine import Engine, WeightReceipt, WeightUpdate
from .environment import Environment, EpisodeFailed, Observation
from .forward import Forward, Policy, Replayed, ReplayedTokens
from .model import (
    DiffusionModel,
    DivergenceKind,
    Model,
    OutputHead,
    TextModel,
    TokenBatch,
    diffusion_model,
    text_model,
)
from .reward import GradientScore, Reward, ScoreInput, Scores
from .tracker import RunInfo, Tracker
from .transport import PieceLike, RemoteRowsLike, Transport, TransportCounts, TransportPlace

__all__ = [
    "Algorithm",
    "Backend",
    "DiffusionModel",
    "DivergenceKind",
    "Engine",
    "Environment",
    "EpisodeFailed",
    "Forward",
    "GradientScore",
    "Job",
    "LossTerm",
    "Losses",
    "Metric",
    "Model",
    "Observation",
    "OutputHead",
    "PieceLike",
    "Policy",
    "RemoteRowsLike",
    "Replayed",
    "ReplayedTokens",
    "Reward",
    "RunInfo",
    "ScoreInput",
    "Scores",
    "TextModel",
    "TokenBatch",
    "Tracker",
    "TrainReport",
    "Transport",
    "TransportCounts",
    "TransportPlace",
    "WeightReceipt",
    "WeightUpdate",
    "diffusion_model",
    "text_model",
]
