"""The torch backend: models, trainer and sampler in the engine's own process."""
