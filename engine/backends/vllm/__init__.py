"""vLLM (arXiv:2309.06180) as a sampler. No module imports vllm at import time, except those that run in its workers."""
