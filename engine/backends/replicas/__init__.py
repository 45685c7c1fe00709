"""Samplers in other processes: a pool of replicas, which requests and weights are sent to. It does not import
vLLM: the process of a replica is an actor of `engine.backends.vllm`.
"""
