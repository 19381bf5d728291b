"""What is in a model file: one module per format, each giving an `Inspection`. Nothing is run, no engine is loaded."""
