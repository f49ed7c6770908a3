"""Evidence, as data only: the source shapes each patch knows, the environments we test, and GPU validation records."""
