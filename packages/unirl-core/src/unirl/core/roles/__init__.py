"""Roles: what the parts of a run do for each other. A plugin's `build` returns an object that fits its role.

The loop calls nothing else. A model is plain torch and knows nothing of engines or trainers; an engine turns a request
into a track; a backend owns what trains; an algorithm returns loss terms and never runs backward itself.
"""

from .critic import CriticAlgorithm, CriticBackend
from .engine import Engine, WeightReceipt, WeightUpdate
from .model import (
    ComparedTextModel,
    DiffusionModel,
    DivergenceKind,
    EncodingModel,
    LazyModel,
    MediaTextModel,
    Model,
    OutputHead,
    SequenceModel,
    StoredTextModel,
    TextModel,
    TokenBatch,
    diffusion_model,
    lazy_model,
    media_text_model,
    sequence_model,
    text_model,
)
from .reward import GradientScore, Reward, ScoreInput, Scores
from .tracker import RunInfo, Tracker
from .training import (
    Algorithm,
    Backend,
    Forward,
    Job,
    LazyBackend,
    Losses,
    LossTerm,
    Metric,
    Policy,
    Replayed,
    ReplayedTokens,
    StatefulAlgorithm,
    TrainReport,
)
from .transport import PieceLike, RemoteRowsLike, Transport, TransportCounts, TransportPlace

__all__ = [
    "Algorithm",
    "Backend",
    "ComparedTextModel",
    "CriticAlgorithm",
    "CriticBackend",
    "DiffusionModel",
    "DivergenceKind",
    "EncodingModel",
    "Engine",
    "Forward",
    "GradientScore",
    "Job",
    "LazyBackend",
    "LazyModel",
    "LossTerm",
    "Losses",
    "MediaTextModel",
    "Metric",
    "Model",
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
    "SequenceModel",
    "StatefulAlgorithm",
    "StoredTextModel",
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
    "lazy_model",
    "media_text_model",
    "sequence_model",
    "text_model",
]
