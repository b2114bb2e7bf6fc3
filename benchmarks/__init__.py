"""Speed as ratios measured in one run. Each benchmark checks its result before it times anything and writes a run record."""
