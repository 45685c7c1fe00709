"""Sends the metrics and tables of a run to TensorBoard, Weights & Biases, MLflow and SwanLab."""
