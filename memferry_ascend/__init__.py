"""Train PyTorch models larger than device memory."""

__version__ = "0.1.0"
