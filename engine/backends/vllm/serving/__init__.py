"""vLLM replicas as Ray actors: their start, the pool that holds them, and how completions are distributed over them."""
