"""vLLM (arXiv:2309.06180) as a sampler. Nothing here imports vllm at import time but what its workers load."""
