"""Weight files: safetensors and GGUF, read and written tensor by tensor."""
