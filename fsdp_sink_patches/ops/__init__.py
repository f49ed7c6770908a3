"""The maths, usable without any patch. This package knows torch and nothing of patches or upstreams."""
