"""The versions of Keras and TensorFlow that the package was tested with.

`make matrix` tests them; pyproject.toml has the same bounds.
"""

from __future__ import annotations

import re
import warnings

# The first version that was tested, and the first that was not.
TENSORFLOW = ((2, 20), (2, 22))
KERAS = ((3, 10), (3, 16))


def check(backend: str, keras_version: str, tensorflow_version: str) -> None:
    """Checks the backend of Keras, and warns of versions that were not tested.

    Raises:
        ImportError: If the backend is not TensorFlow.
    """
    if backend != "tensorflow":
        raise ImportError(
            "tfgradcomp exchanges gradients by TensorFlow and needs Keras with the "
            "TensorFlow backend: set KERAS_BACKEND=tensorflow in the environment, or "
            '"backend" in ~/.keras/keras.json, before Keras is imported. '
            f"Received: backend={backend!r}"
        )
    for name, version, (first, end) in (
        ("TensorFlow", tensorflow_version, TENSORFLOW),
        ("Keras", keras_version, KERAS),
    ):
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if not first <= found < end:
            first_text, end_text = (".".join(map(str, bound)) for bound in (first, end))
            warnings.warn(
                "tfgradcomp replaces private parts of Keras and was tested with "
                f"{name} {first_text} or newer, below {end_text}; another version may "
                f"fail or train wrongly. Received: {name}=={version}",
                stacklevel=2,
            )
