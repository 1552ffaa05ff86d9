"""A stand-in for SGLang as an engine over several nodes, for its agents' tests without SGLang."""
