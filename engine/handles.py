"""Handles for people: `Model(key)` -> builder -> `TrainingModel` / `InferenceModel`.

A handle holds references, never weights. `TrainingModel` moves along its chain; `train_*` calls are written on a
tape, and `optim_step` commits the tape as a batch and takes one step through the same door as every training class.
"""

from __future__ import annotations

from engine.models.builder import Model, ModelBuilder
from engine.models.inference_model import HasWorkspace, InferenceModel
from engine.models.openai_model import OpenAIModel
from engine.models.training_model import TrainingModel
from engine.text.answers import MalformedAnswer

__all__ = [
    "HasWorkspace",
    "InferenceModel",
    "MalformedAnswer",
    "Model",
    "ModelBuilder",
    "OpenAIModel",
    "TrainingModel",
]
