"""Where models and data come from. `fetch.py` turns a reference into a verified local path; the rest read formats."""
