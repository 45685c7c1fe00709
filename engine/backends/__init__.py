"""Trainers and samplers: the protocols of `engine.backends.protocol` and their implementations.

Only this package, `engine.losses` and `engine.local` import torch. They are imported when an embedded engine starts.
"""
