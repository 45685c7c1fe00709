"""Where the figures of a run are sent besides the terminal: TensorBoard, Weights & Biases, MLflow, SwanLab."""
