"""The faults that `make mutations` puts into the package can still be put there."""

import pytest

from tests.mutations import MUTATIONS, ROOT, Edit, Mutation, MutationError, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_texts_stand_in_the_source_once(mutation):
    text = (ROOT / mutation.path).read_text()
    compile(mutated(text, mutation), mutation.path, "exec")


@pytest.mark.parametrize(("text", "count"), [("b", 0), ("aa", 2)])
def test_a_text_that_is_not_there_once_is_refused(text, count):
    mutation = Mutation("of a", "some.py", (Edit("a", "c"),), ())
    with pytest.raises(MutationError, match=f"some.py has {count} times: 'a'"):
        mutated(text, mutation)
