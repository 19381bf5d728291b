"""An OpenAI-compatible HTTP server over any engine that implements `edgec.serving.backend.Backend`."""
