"""TensorRT's network API in torch, on CPUs: networks are checked and run without TensorRT."""
