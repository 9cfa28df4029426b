"""Federated training over the messages of Flower.

`run` is the hub of `tfgradcomp.federated`, in a ServerApp; `client_app` returns the
clients' ClientApp. Flower starts a process for each message. So a message brings all
that the hub has to say; the client restores itself from its folder, listens, takes its
local steps, saves itself and answers. Messages, bookkeeping and weights are those of
`federated`.
"""

try:
    import flwr.app  # noqa: F401
except ImportError as error:
    raise ImportError(
        "tfgradcomp.flower needs Flower, with Python 3.11 or later: "
        f'pip install "tfgradcomp[flower]". Received: {error}'
    ) from error

from tfgradcomp.flower.node import client_app  # noqa: E402
from tfgradcomp.flower.server import run  # noqa: E402

__all__ = ["client_app", "run"]
