"""Opening a run: its session, the context of a recipe, the estimate of its cost, its code version and its events."""
