"""Conversations as text and as token ids, and the tokenizers that lead from one to the other. Without torch."""
