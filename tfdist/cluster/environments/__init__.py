"""The environments that tfdist can find itself in, one file each."""
