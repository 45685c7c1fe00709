"""Ray as this engine uses it: the connection, placement, and groups of actors. The only package that imports ray.

Ray places processes on machines, starts them, and tells when one of them has died. This package adds what Ray does not
know: that the ranks of a trainer live and die together (`rank_group`), and
that a rank without progress hangs (`hang_detector`).
`connection`, `placement` and `rank_group` are for the engine's process; `rank_actor` and `rank_progress` run inside
the ranks.
`actors` is for processes that stand alone, as vLLM's replicas do: one actor, called from an event loop.
`workers` are the worker processes of graders on every machine, for the process of a run.
"""
