"""vLLM replicas as Ray actors: their start, their pool, and how requests are spread over them."""
