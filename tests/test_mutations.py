"""The faults that `make mutations` puts into the package can still be put there."""

import pytest

from tests.mutations import MUTATIONS, ROOT, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_edits_the_source(mutation):
    text = (ROOT / mutation.path).read_text()
    compile(mutated(text, mutation), mutation.path, "exec")
