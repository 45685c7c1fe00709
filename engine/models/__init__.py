"""Handles of models: builders, training and inference models, and the primitives of hand-written loops."""
