"""Public handles of models: `Model(key)` -> `ModelBuilder` -> `TrainingModel` or `InferenceModel`.

A handle holds references, never weights. A `TrainingModel` points to one policy of its chain. Its `train_*` calls
record samples on a tape. `optim_step` commits the tape as a batch and takes one step, with the same engine call that
the training classes use.
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
