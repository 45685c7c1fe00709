"""Everything that computes with tensors: models, sampling, losses and the optimizer, behind the protocol of
`engine.protocol`. This package does not import Prefect.
"""
