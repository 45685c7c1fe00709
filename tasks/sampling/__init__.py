"""Generates and grades rollouts: completions of prompts and episodes in environments, as tables."""
