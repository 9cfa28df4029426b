"""The part of the hub's bookkeeping that survives a restart."""

from __future__ import annotations

import collections
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from tfgradcomp.federated import codec
from tfgradcomp.federated.anchor import Anchor, OuterStep
from tfgradcomp.federated.bound_method import SERVER, BoundMethod, arrays_of
from tfgradcomp.federated.description import Description

NORMS_KEPT = 64
"""Number of accepted norms whose median judges further payloads."""


@dataclass
class Member:
    """A client that has joined at some time.

    Attributes:
        number: Its place in sums.
        life: Number of its folder; a client that has lost its folder gets another.
        settled: Sequence number of its last payload that was counted or left out.
    """

    number: int
    life: int = 0
    settled: int = 0


class HubState:
    """The anchor, the server's residual, the last replies, and what is settled.

    Args:
        bound: The method, bound to the model.
        description: What clients must agree with.
        anchor: The first anchor.
        outer: The outer step.
        seed: Seed of random numbers.
        saved: The result of `to_files`, to go on from there.

    Raises:
        ValueError: If `saved` is that of another training.
    """

    def __init__(
        self,
        bound: BoundMethod,
        description: Description,
        anchor: Anchor,
        outer: OuterStep,
        seed: int,
        saved: tuple[Mapping, Mapping[str, np.ndarray]] | None = None,
    ):
        self.training = secrets.token_hex(8)
        self.description, self.outer, self.seed = description, outer, seed
        self.anchor, self.server_state = anchor, bound.server_state()
        self.members: dict[str, Member] = {}
        self.replies: collections.deque[codec.Reply] = collections.deque()
        self.norms: collections.deque[float] = collections.deque(maxlen=NORMS_KEPT)
        if saved is not None:
            self._restore(bound, *saved)

    def keep(self, reply: codec.Reply, most: int) -> None:
        """Keeps a reply for clients that miss it.

        Args:
            reply: The reply.
            most: Greatest number of replies. They are fewer where they would be longer
                than the anchor, which is then sent in their place.
        """
        self.replies.append(reply)
        while len(self.replies) > 1 and (
            len(self.replies) > most
            or sum(len(r.payload) + len(r.statistics) for r in self.replies)
            > self.anchor.nbytes
        ):
            self.replies.popleft()

    def missed(self, hello: codec.Hello) -> list[codec.Reply] | None:
        """Returns the replies that a client has missed; None if it needs the anchor."""
        digests = {reply.round: reply.digest for reply in self.replies}
        digests[self.anchor.round] = self.anchor.digest
        # The anchor before the first of the replies is known no more.
        before = self.replies[0].round - 1 if self.replies else self.anchor.round
        digests.setdefault(before, hello.digest)
        if not hello.training or digests.get(hello.round) != hello.digest:
            return None
        return [reply for reply in self.replies if reply.round > hello.round]

    def to_files(self) -> tuple[dict, dict[str, np.ndarray]]:
        """Returns what a restart needs: small values, and arrays by their names."""
        arrays = arrays_of(self.server_state, SERVER) | self.anchor.arrays
        for reply in self.replies:
            for name in ("payload", "statistics"):
                data = np.frombuffer(getattr(reply, name), np.uint8)
                arrays[f"reply.{reply.round}.{name}"] = data
        values = {
            **self._identity(),
            "training": self.training,
            "round": self.anchor.round,
            "members": {name: asdict(m) for name, m in self.members.items()},
            "replies": [
                {k: v for k, v in r._asdict().items() if not isinstance(v, bytes)}
                for r in self.replies
            ],
            "norms": [*self.norms],
        }
        return values, arrays

    def _identity(self):
        return {
            "description": self.description._asdict(),
            "outer": asdict(self.outer),
            "seed": self.seed,
        }

    def _restore(self, bound, values, arrays):
        for name, mine in self._identity().items():
            if values[name] != mine:
                raise ValueError(
                    f"The hub's folder belongs to a training with another {name}. Give "
                    "this one a new folder, or the arguments of before. Received: "
                    f"{name}={mine}, before {values[name]}"
                )
        self.training = values["training"]
        self.anchor = Anchor.of(values["round"], arrays)
        self.server_state = bound.server_state(arrays)
        self.members = {n: Member(**m) for n, m in values["members"].items()}
        self.norms.extend(values["norms"])
        for fields in values["replies"]:
            parts = {
                name: arrays[f"reply.{fields['round']}.{name}"].tobytes()
                for name in ("payload", "statistics")
            }
            self.replies.append(codec.Reply(**fields, **parts))
