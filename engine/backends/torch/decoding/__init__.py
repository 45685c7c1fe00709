"""The parts of the torch sampler: drawing of tokens, the cache of keys and values, and the decoder's forward pass."""
