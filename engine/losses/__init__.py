"""Losses: `spec` says which one (no torch), the other modules are the maths, pure functions on flat unpadded axes."""
