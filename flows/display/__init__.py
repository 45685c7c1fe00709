"""Output for people while a run works: the terminal, and the page and log of the flow run in Prefect."""
