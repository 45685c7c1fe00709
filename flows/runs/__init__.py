"""Opening a run: its session, the context of a recipe, the estimate before it, its code version and events."""
