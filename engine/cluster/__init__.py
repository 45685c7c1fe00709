"""Ray as this engine uses it: the connection, placement, and groups of actors. Only this package imports ray.

Ray places processes on machines, starts them, and notices when one of them dies. This package adds what Ray does not
know: the ranks of a trainer start and end together (`rank_group`), and a rank without progress hangs (`rank_progress`).

- `connection`, `placement` and `rank_group` are used by the engine's process.
- `rank_actor` and `rank_progress` run inside the ranks.
- `actors` is for single processes, such as vLLM's replicas, which are called from an event loop.
- `workers` holds the worker processes of graders on every machine, and is used by the process of a run.
"""
