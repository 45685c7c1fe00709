"""Promotion of a model to champion: the gate that compares it, a person's approval, and the model card."""
