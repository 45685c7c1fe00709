"""Runs vLLM replicas as Ray actors: starts them, restarts them when they fail, and distributes requests over them."""
