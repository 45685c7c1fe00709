"""Reports of a run: the metrics of its steps, the HTML report, plots, the page of its flow run."""
