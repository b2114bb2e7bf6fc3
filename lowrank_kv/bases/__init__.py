"""Fixed bases: second moments of states, the bases computed from them, and the ranks that a budget allows."""
