"""The trainer `deepspeed`: ZeRO (arXiv:1910.02054) on a group of ranks. `backend` runs in the engine's process and
never imports deepspeed; `ranks` is what every rank builds."""

OUT_OF_MEMORY_MARK = "this rank ran out of memory in the middle of a pass"
"""What a rank says last when it could not tell the others: the next try keeps to half the tokens."""
