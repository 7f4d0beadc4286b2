"""Roles: what the parts of a run do for each other. A plugin's `build` returns an object that fits its role.

The loop calls nothing else. A model is plain torch and knows nothing of engines or trainers; an engine turns a request
into a rollout; a backend owns what trains; an algorithm returns loss terms and never runs backward itself.
"""

from .critic import CriticAlgorithm, CriticBackend
from .engine import Engine, WeightReceipt, WeightUpdate
from .model import DiffusionModel, Model, TextModel, TokenBatchLike
from .reward import Reward, ScoreInput, Scores
from .running import Launcher, RunInfo, Tracker
from .training import (
    Algorithm,
    Backend,
    LatentAlgorithm,
    Losses,
    LossTermLike,
    Metric,
    Policy,
    Replay,
    ReplayedLike,
    StatefulAlgorithm,
    TrainReport,
)
from .transport import PieceLike, RemoteRowsLike, Transport, TransportCounts, TransportPlace

__all__ = [
    "Algorithm",
    "Backend",
    "CriticAlgorithm",
    "CriticBackend",
    "DiffusionModel",
    "Engine",
    "LatentAlgorithm",
    "Launcher",
    "LossTermLike",
    "Losses",
    "Metric",
    "Model",
    "PieceLike",
    "Policy",
    "RemoteRowsLike",
    "Replay",
    "ReplayedLike",
    "Reward",
    "RunInfo",
    "ScoreInput",
    "Scores",
    "StatefulAlgorithm",
    "TextModel",
    "TokenBatchLike",
    "Tracker",
    "TrainReport",
    "Transport",
    "TransportCounts",
    "TransportPlace",
    "WeightReceipt",
    "WeightUpdate",
]
