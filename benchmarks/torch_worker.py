"""One worker of PyTorch's: times gloo and DDP on the gradients of `worker.py`.

    TF_CONFIG=... python benchmarks/torch_worker.py FOLDER

The first worker's address in TF_CONFIG is where all meet. Reads FOLDER/task.json and
writes FOLDER/answer-RANK.json. Variants come one after the other, each next to the same
step with nothing exchanged, and are freed before the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from cluster import interface_bytes
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from workloads import WORKLOADS

RATE = 1e-3
# DDP forms its buckets after its first step, and PowerSGD begins with its third.
WARM_UP = 4


class Product(torch.autograd.Function):
    """A number whose gradient by a parameter is a given constant."""

    @staticmethod
    def forward(ctx, parameter, gradient):
        """Returns zero."""
        ctx.save_for_backward(gradient)
        return parameter.new_zeros([])

    @staticmethod
    def backward(ctx, _):
        """Returns the constant."""
        return ctx.saved_tensors[0].clone(), None


class Parameters(torch.nn.Module):
    """Parameters of given shapes and a loss that has given gradients."""

    def __init__(self, gradients: list[torch.Tensor]):
        super().__init__()
        self.gradients = gradients
        self.weights = torch.nn.ParameterList(torch.zeros_like(g) for g in gradients)

    def forward(self):
        """Returns the loss."""
        pairs = zip(self.weights, self.gradients, strict=True)
        return sum(Product.apply(weight, gradient) for weight, gradient in pairs)


def all_reduce(gradients):
    """One vector, in place; nothing else is in the step."""
    constant = torch.cat([g.reshape(-1) for g in gradients])
    vector = constant.clone()

    def prepare():
        vector.copy_(constant)

    return prepare, lambda: dist.all_reduce(vector), None, vector


def distributed(gradients, hook=None):
    """Loss, gradients and SGD of a DistributedDataParallel model."""
    model = Parameters(gradients)
    # PowerSGD waits for one all-reduce in the thread that ended another, and gloo has
    # two threads: several buckets would wait for ever.
    whole = 1 + sum(4 * g.numel() for g in gradients) // 2**20
    bucket = whole if hook == "powersgd" else None
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    if hook == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def prepare():
        optimizer.zero_grad(set_to_none=True)

    def step(synchronised=True):
        with contextlib.nullcontext() if synchronised else parallel.no_sync():
            parallel().backward()
        optimizer.step()

    return prepare, step, lambda: step(False), max(model.weights, key=torch.numel).data


VARIANTS = {
    "gloo all-reduce, one vector": all_reduce,
    "DDP": distributed,
    "DDP, float16": lambda gradients: distributed(gradients, "fp16"),
    "DDP, PowerSGD rank 1": lambda gradients: distributed(gradients, "powersgd"),
}


def measure(make, gradients, rounds, interface) -> dict:
    """Returns the answer of one variant."""
    prepare, step, plain, watched = make(gradients)
    names = ("seconds", "plain", "sent", "received")
    answer = {name: [] for name in names}
    one = torch.ones(1)
    for round_ in range(-WARM_UP, rounds):
        for call, name in ((step, "seconds"), (plain, "plain")):
            if call is None:
                continue
            prepare()
            dist.all_reduce(one)
            if interface:
                before = interface_bytes(interface)
                # Nobody sends before all have read.
                dist.all_reduce(one)
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            dist.all_reduce(one)
            if round_ == -WARM_UP and call is step:
                answer["update"] = watched.reshape(-1)[:8].tolist()
            if round_ < 0:
                continue
            answer[name].append(seconds)
            if interface and call is step:
                after = interface_bytes(interface)
                answer["sent"].append(after.sent - before.sent)
                answer["received"].append(after.received - before.received)
    return answer


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    config = json.loads(os.environ["TF_CONFIG"])
    addresses, rank = config["cluster"]["worker"], config["task"]["index"]
    if task["interface"]:
        os.environ["GLOO_SOCKET_IFNAME"] = task["interface"]
    dist.init_process_group(
        "gloo", f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )
    rng = np.random.default_rng(rank)
    # Outputs first, as PyTorch has kernels: PowerSGD takes the rest as columns.
    gradients = [
        torch.from_numpy(np.ascontiguousarray(rng.standard_normal(shape, np.float32).T))
        for shape in WORKLOADS[task["workload"]]()
    ]
    answers = [
        measure(VARIANTS[v["name"]], gradients, task["rounds"], task["interface"])
        for v in task["variants"]
    ]
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = {"peak": peak, "variants": answers}
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))
    # All have their answers. PowerSGD's threads now and then abort an orderly exit
    # ("terminate called without an active exception").
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
