"""edgec builds a PyTorch checkpoint for phones, and proves what it built."""

__version__ = "0.1.0"
