"""What the training loops share: the base class, the loop over a dataset, resumption, checkpoints, schedules."""
