"""What survives: checkpoints, and what is learnt from them."""
