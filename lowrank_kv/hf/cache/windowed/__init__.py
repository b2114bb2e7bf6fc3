"""Cache layers that keep a window of tokens at full rank beside tokens as coefficients of one rank."""
