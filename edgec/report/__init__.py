"""What a build says when it is over: one document (document.py), and its renderings for people and for machines."""
