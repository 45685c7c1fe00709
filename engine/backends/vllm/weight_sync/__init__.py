"""Loads a trainer's weights into vLLM, and proves that they arrived."""
