"""What several Triton kernels share: rebuilding keys, splitting a softmax and merging its splits, launching."""
