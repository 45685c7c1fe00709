"""Evaluation of models: completions and episodes of fixed prompts, losses on held-out rows, comparisons."""
