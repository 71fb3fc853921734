"""Training on parameter servers: `fit`, `evaluate` and `predict` through a ClusterCoordinator.

The coordinator reads the data and hands executions of a few steps to whichever worker is free;
workers fetch the weights from the servers, compute gradients, and send them to the servers, where
the optimizer's update runs. See docs/parameter-servers.md.
"""
