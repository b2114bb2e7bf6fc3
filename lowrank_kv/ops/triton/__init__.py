"""What several Triton kernels share: rebuilding keys, weighing rows, splitting a softmax and merging splits, launching."""
