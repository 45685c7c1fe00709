"""What a config says of the engine: trainer, sampler, adapters, cluster. Plain data without torch."""
