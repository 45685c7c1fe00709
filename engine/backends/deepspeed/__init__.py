"""The trainer `deepspeed`: ZeRO (arXiv:1910.02054) on a group of ranks.

`backend` runs in the engine's process and never imports deepspeed. `ranks` is what every rank process builds.
"""

OUT_OF_MEMORY_MARK = "this rank ran out of memory in the middle of a pass"
"""Last message of a rank that ran out of memory while the other ranks were waiting for it. The engine then tries again
with half the tokens per forward pass."""
