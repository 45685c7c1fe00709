"""The handles of models, which users train and generate with, and the `train_*` calls of hand-written loops."""
