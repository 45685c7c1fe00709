"""Weight files: safetensors and GGUF, read and written tensor by tensor, and digests of their contents."""
