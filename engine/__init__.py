"""Tensors: models, sampling, losses, the optimizer, behind one protocol. Knows no Prefect."""
