"""The TensorRT targets: a step graph becomes a strongly typed network, and that a plan."""
