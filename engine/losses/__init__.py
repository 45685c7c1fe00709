"""Losses: each module holds loss specs and their functions. Only `inputs` and `normalisation` import torch."""
