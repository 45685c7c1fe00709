"""What a person sees while a run works: the terminal, the page and the log of the flow run in Prefect."""
