"""Operation on Prefect: the services of one machine, and the settings and deployments of a Prefect server."""
