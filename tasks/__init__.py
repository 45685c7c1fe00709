"""The tasks of a run. Each module here defines Prefect tasks, which are retried; the folders hold the code that they
call: graders, environments, datasets, batches, advantages, evaluations, reports and loggers."""
