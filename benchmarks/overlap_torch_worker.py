"""One worker of `overlap.py` in PyTorch: the same steps with DistributedDataParallel.

    TF_CONFIG=... python benchmarks/overlap_torch_worker.py FOLDER

The first worker's address in TF_CONFIG is where all meet. Reads FOLDER/task.json and
writes FOLDER/answer-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import INTERFACE
from processes import timed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch_worker import Parameters

RATE = 1e-3
WORDS, LENGTH, WIDTH = 30_522, 16, 768


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width

        def convolution(a, b, size, step=1):
            layer = nn.Conv2d(a, b, size, step, size // 2, bias=False)
            return nn.Sequential(layer, nn.BatchNorm2d(b))

        self.body = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(),
            convolution(width, width, 3, stride),
            nn.ReLU(),
            convolution(width, outputs, 1),
        )
        is_same = inputs == outputs and stride == 1
        self.short = (
            nn.Identity() if is_same else convolution(inputs, outputs, 1, stride)
        )

    def forward(self, x):
        """Returns the block's output."""
        return torch.relu(self.body(x) + self.short(x))


def resnet_50() -> tuple[nn.Module, torch.Tensor]:
    """Returns a ResNet-50 and small images."""
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            stride = 2 if index == 0 and width > 64 else 1
            layers.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*layers), torch.randn(32, 3, 64, 64)


class Bert(nn.Module):
    """An encoder of BERT-base's size."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 12, 4 * WIDTH, 0.0, "gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        """Returns the logits."""
        return self.head(self.encoder(self.words(x))[:, 0])


def bert_base() -> tuple[nn.Module, torch.Tensor]:
    """Returns an encoder of BERT-base's size and short texts."""
    return Bert(), torch.randint(WORDS, (8, LENGTH))


MODELS = {"ResNet-50": resnet_50, "BERT-base": bert_base}


def parallel(model: nn.Module, method: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model that exchanges its gradients, and its optimizer."""
    wrapped = DistributedDataParallel(model)
    if method == "DDP, float16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped, torch.optim.SGD(model.parameters(), RATE)


def main(folder: Path) -> None:
    """Measures what the task asks for."""
    task = json.loads((folder / "task.json").read_text())
    config = json.loads(os.environ["TF_CONFIG"])
    addresses, rank = config["cluster"]["worker"], config["task"]["index"]
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group(
        "gloo", f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )
    torch.manual_seed(0)
    model, x = MODELS[task["model"]]()
    gradients = [torch.full_like(p, 1e-4) for p in model.parameters()]
    loss, y = nn.CrossEntropyLoss(), torch.arange(len(x)) % 10
    wrapped, optimizer = parallel(model, task["method"])
    constant, constant_optimizer = parallel(Parameters(gradients), task["method"])

    def train():
        loss(wrapped(x), y).backward()
        optimizer.step()

    def exchange():
        constant().backward()
        constant_optimizer.step()

    def without(call, model):
        def run():
            with model.no_sync():
                call()

        return run

    def forward():
        with torch.no_grad():
            loss(wrapped(x), y)

    calls = {
        "forward": forward,
        "alone": without(train, wrapped),
        "update": without(exchange, constant),
        "exchange, gloo": exchange,
        "step, gloo": train,
    }
    seconds = {name: [] for name in calls}
    idle = {name: [] for name in calls}
    # DDP forms its buckets after its first step.
    for round_ in range(-3, task["rounds"]):
        for name, call in calls.items():
            optimizer.zero_grad(set_to_none=True)
            constant_optimizer.zero_grad(set_to_none=True)
            dist.barrier()
            taken = timed(call)
            if round_ >= 0:
                seconds[name].append(taken[0])
                idle[name].append(taken[1])
    answer = {"seconds": seconds, "idle": idle}
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
