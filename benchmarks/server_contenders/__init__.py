"""What `benchmarks/parameter_server.py` runs in each process."""
