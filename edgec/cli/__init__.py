"""The command line: one file per command. A command parses, calls one function, and prints; nothing heavy at import."""
