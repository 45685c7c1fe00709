"""What runs tensors: trainers and samplers behind one protocol, and the tiny model that stands in for a real one.
The only place, with the losses and `engine.local`, that imports torch; loaded lazily."""
