"""One process of PyTorch: alone, or one of DistributedDataParallel over gloo."""

from __future__ import annotations

import measure

orders = measure.begin()
options = orders.options

import torch  # noqa: E402
import torch_models  # noqa: E402
from torch import distributed  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from workloads import LEARNING_RATE  # noqa: E402
from workloads import data  # noqa: E402

torch.set_num_threads(1)
torch.set_num_interop_threads(1)
torch.manual_seed(0)

model = torch_models.build(orders.model)
parameters = sum(p.numel() for p in model.parameters())
x, y = (torch.from_numpy(a) for a in data(orders.model, orders.batch))
y = y.long()
if options.get("channels_last"):
    x = x.permute(0, 1, 4, 2, 3)  # The data lies in memory so already.
    model = model.to(memory_format=torch.channels_last)

if orders.processes > 1:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{orders.directory}/rendezvous",
        rank=orders.rank,
        world_size=orders.processes,
    )
    model = torch.nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=options["bucket_cap_mb"],
        gradient_as_bucket_view=True,
        static_graph=True,
        broadcast_buffers=False,  # Moving statistics are a replica's own, as with tfdist.
    )
    if options.get("compress"):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        def compressed(state, bucket):
            # Under its own name PyTorch allows the hook on NCCL only; gloo sums bfloat16, too.
            return default_hooks.bf16_compress_hook(state, bucket)

        model.register_comm_hook(None, compressed)

optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, fused=True)


def train(steps: int, clock: measure.Clock) -> None:
    for step in range(steps):
        i = step % len(x)
        loss = cross_entropy(model(x[i]).flatten(0, -2), y[i].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(step + 1)


measure.compare(orders, train, parameters)
if orders.processes > 1:
    distributed.destroy_process_group()
