"""The trainer `deepspeed`: ZeRO (arXiv:1910.02054) on a group of ranks. `backend` runs in the engine's process and never
imports deepspeed; `ranks` is what every rank builds."""
