"""Training in rounds over the internet, with clients that come and go.

A `Hub` combines what `Client`s have learnt on their own data in a few local steps each;
`tfgradcomp-hub` and `tfgradcomp-join` are their commands.
"""

from tfgradcomp import lazy

# Imported at their first use: the commands answer --help without TensorFlow.
_ORIGINS = {
    "Client": "tfgradcomp.federated.client",
    "Hub": "tfgradcomp.federated.hub",
    "OuterStep": "tfgradcomp.federated.anchor",
    "RefusedError": "tfgradcomp.federated.client_logic",
    "Round": "tfgradcomp.federated.rounds",
}

__all__ = [*_ORIGINS]

__getattr__ = lazy.attributes(__name__, _ORIGINS)
