"""What a model is for: its data, its preprocessing, its loss and its metric. One kind a module, registered by name."""
