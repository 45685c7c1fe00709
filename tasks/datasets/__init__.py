"""Where threads come from: declared datasets (files, reasoning-gym, threads in process), loaded once into a
content-named table, and the seeded order in which a run walks through them."""
