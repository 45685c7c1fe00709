"""Text: conversations, tokenizers and the rendering of one into the ids of the other. transformers, but no torch."""
