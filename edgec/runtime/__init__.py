"""The on-device runtime: the C++ core in `native/`, its host binding, and what a bundle gets of it."""
