"""One job for several schedulers: Kubernetes, Slurm, Ray.

plan, section = tfdist.schedulers.plan.load("configs/digits-slurm.yaml", "slurm")
script = tfdist.schedulers.slurm.render(plan, section)

`tfdist render --for slurm configs/digits-slurm.yaml` does the same.
"""
