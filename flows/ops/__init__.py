"""Operating Ostinato on Prefect: what one machine runs, and what a Prefect server is told."""
