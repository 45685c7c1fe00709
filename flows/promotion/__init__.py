"""Promotion of a model to champion: the gate, the approval, the model card, the event."""
