"""A group of rank processes behind one object: started, watched and started again by the engine's process.

It knows no trainer: `group.Group` takes the dotted path of a class, which every rank builds once. Only `rank` imports
torch."""
