"""One worker of `time_to_accuracy.py`: trains with PyTorch's DDP.

    TF_CONFIG=... python benchmarks/learning_torch_worker.py FOLDER

Reads FOLDER/task.json (see `learning.py`) and writes FOLDER/answer-RANK.json.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import INTERFACE
from learning import MOMENTUM, RATE, WIDTHS, Examples, train
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def make_model(way: str, seed: int) -> DistributedDataParallel:
    """Returns the model of all workers, with what its gradients travel by."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    # As Keras draws them.
    for layer in layers[::2]:
        torch.nn.init.xavier_uniform_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    # PowerSGD with several buckets waits for ever (`torch_worker.py`).
    bucket = 1024 if "PowerSGD" in way else None
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers[:-1]), bucket_cap_mb=bucket
    )
    if way == "DDP, float16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(way.split()[-1]), start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def main(folder: Path) -> None:
    """Trains what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    config = json.loads(os.environ["TF_CONFIG"])
    addresses, rank = config["cluster"]["worker"], config["task"]["index"]
    if task["on_links"]:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group(
        "gloo", f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )
    examples = Examples(task, rank, len(addresses))
    model = make_model(task["way"], task["seed"])
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    loss = torch.nn.CrossEntropyLoss()
    test, labels = torch.from_numpy(examples.test), torch.from_numpy(examples.labels)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()

    def hits():
        with torch.no_grad():
            right = (model.module(test).argmax(1) == labels).sum().float()
        dist.all_reduce(right)
        return float(right)

    answer = train(task, examples, step, hits)
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))
    # As `torch_worker.py`: PowerSGD's threads may abort an orderly exit.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
