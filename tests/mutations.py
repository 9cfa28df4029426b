"""Puts faults into a copy of the package and says whether quick tests notice them.

    python -m tests.mutations              all of them; takes some minutes
    python -m tests.mutations residual     those whose name has this in it

Not a part of the tests: `make mutations` runs it. A mutation that survives names a
contract that no quick test holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# What pytest's exit codes mean: all passed, some failed; the others are errors.
_PASSED, _FAILED = 0, 1


class Edit(NamedTuple):
    """A text that stands in a file exactly once, and what takes its place."""

    old: str
    new: str


class Mutation(NamedTuple):
    """A fault.

    Attributes:
        name: What is wrong, in a few words.
        path: The file that it is put into, from the root of the tree.
        edits: What changes there.
        tests: Arguments of pytest: quick tests, of which one must fail.
    """

    name: str
    path: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


class MutationError(Exception):
    """A mutation that cannot be tried; the message says why."""


MUTATIONS = (
    Mutation(
        "the vote of summed signs is flipped",
        "tfgradcomp/servers/majority_vote.py",
        (Edit("votes = tf.sign(net)", "votes = tf.sign(-net)"),),
        ("tests/transports", "-k", "direct_exchange and ragged and SignSGD"),
    ),
    Mutation(
        "error feedback drops its residual",
        "tfgradcomp/compressors/error_feedback.py",
        (
            Edit(
                'x + context.learning_rate_ratio * residuals.read(state["residual"])',
                "x",
            ),
        ),
        ("tests/compressors/test_error_feedback.py",),
    ),
    Mutation(
        "the residual is not rescaled with the learning rate",
        "tfgradcomp/compressors/error_feedback.py",
        (Edit("context.learning_rate_ratio * residuals.read", "residuals.read"),),
        ("tests/compressors/test_error_feedback.py",),
    ),
    Mutation(
        "shards are cut inside of the chunks of a sum",
        "tfgradcomp/transports/sharding.py",
        (Edit("math.lcm(CHUNK, *map", "math.lcm(1, *map"),),
        ("tests/transports", "-k", "direct_exchange and long and DistEF"),
    ),
    Mutation(
        "a shard draws the random numbers of the first",
        "tfgradcomp/transports/sharding.py",
        (Edit("offset = context.offset + shard.begin", "offset = context.offset"),),
        ("tests/transports", "-k", "direct_exchange and (random or requantized)"),
    ),
    Mutation(
        "momentum is not multiplied",
        "tfgradcomp/compressors/momentum.py",
        (
            Edit(
                'self.momentum * state["momentum"] + (1 - self.momentum) * x',
                'state["momentum"] + (1 - self.momentum) * x',
            ),
        ),
        ("tests/optimizers/test_trajectories.py", "-k", "signum"),
    ),
    Mutation(
        "Nesterov's momentum is not multiplied in one pass",
        "tfgradcomp/compressors/momentum.py",
        (
            Edit(
                'inner["residual"], mu, layout, context',
                'inner["residual"], 1.0, layout, context',
            ),
        ),
        ("tests/optimizers/test_trajectories.py", "-k", "dist_ef_block_sgdm"),
    ),
    Mutation(
        "workers do not share their scale",
        "tfgradcomp/compressors/ternary.py",
        (
            Edit(
                'return {"scale": scale} if self.share_scaler else {}',
                "return {}",
            ),
        ),
        ("tests/optimizers/test_trajectories.py", "-k", "terngrad"),
    ),
    Mutation(
        "a non-finite gradient raises no flag",
        "tfgradcomp/engine/gradient_bucket.py",
        (
            Edit(
                "is_finite = compressed.is_all_finite(x)",
                "is_finite = tf.constant(True)",
            ),
        ),
        ("tests/engine/test_step.py", "-k", "bad_gradient or bad_worker"),
    ),
    Mutation(
        "only the first worker's flag counts",
        "tfgradcomp/engine/step.py",
        (
            Edit(
                "tf.reduce_all(tf.equal(flags, 0))",
                "tf.equal(flags[0], 0)",
            ),
        ),
        ("tests/engine/test_step.py", "-k", "bad_worker"),
    ),
    Mutation(
        "random numbers are those of the first step",
        "tfgradcomp/core/context.py",
        (Edit("tf.cast(self.step, tf.int64) * 2**24 + worker", "worker"),),
        ("tests/compressors/test_random.py",),
    ),
    Mutation(
        "weight decay goes through compression",
        "tfgradcomp/engine/gradient_bucket.py",
        (
            Edit(
                "sent = self.compress(gradients, context, route, observer)",
                "sent = self.compress(\n"
                "            gradients._replace(values=[\n"
                "                None if g is None else g\n"
                "                + getattr(self._weight_decay, 'rate', 0.0)\n"
                "                * tf.convert_to_tensor(w) / gradients.scale\n"
                "                for g, w in zip(gradients.values, weights)\n"
                "            ]),\n"
                "            context, route, observer,\n"
                "        )",
            ),
            Edit("if self._weight_decay:", "if False:"),
        ),
        ("tests/optimizers/test_trajectories.py", "-k", "decay or block_sgdm"),
    ),
    Mutation(
        "the mean is divided by N + 1",
        "tfgradcomp/compressors/base.py",
        (
            Edit(
                "len(next(iter(workers.values()))))",
                "len(next(iter(workers.values()))) + 1)",
            ),
        ),
        ("tests/optimizers/test_trajectories_of_quantizers.py", "-k", "identity"),
    ),
    Mutation(
        "Keras' division by N is not undone",
        "tfgradcomp/engine/step.py",
        (
            Edit(
                "scale = self.collectives.num_workers / (inner",
                "scale = 1 / (inner",
            ),
        ),
        ("tests/optimizers/test_trajectories_of_quantizers.py", "-k", "identity"),
    ),
    Mutation(
        "the shards' replies come from the wrong workers",
        "tfgradcomp/transports/sharded.py",
        (
            Edit(
                "sharding.whole_reply(replies)",
                "sharding.whole_reply(tf.reverse(replies, [0]))",
            ),
        ),
        ("tests/transports", "-k", "direct_exchange and long and SignSGD"),
    ),
    Mutation(
        "a file's server state goes to the first shard",
        "tfgradcomp/engine/state.py",
        (
            Edit(
                "            owned = route.owned_range(rank)",
                "            owned = route.owned_range(0)",
            ),
        ),
        ("tests/engine/test_buckets.py", "-k", "every_transport or any_transport"),
    ),
    Mutation(
        "a bucket's random numbers begin behind its padding",
        "tfgradcomp/engine/bucket_ranges.py",
        (Edit("return self.begin - self.alignment_padding", "return self.begin"),),
        ("tests/engine/test_buckets.py", "-k", "any_bucketing and TernGrad"),
    ),
    Mutation(
        "a layout that varies has longer blocks",
        "tfgradcomp/core/layout.py",
        (Edit("tf.range(0, size, block_size)", "tf.range(0, size, block_size + 1)"),),
        ("tests/transports/test_rows.py",),
    ),
    Mutation(
        "XLA's sparse words stand for the next elements",
        "tfgradcomp/ops/reference/sparse.py",
        (
            Edit(
                "upper | tf.range(sent.shape[0])",
                "upper | (tf.range(sent.shape[0]) + 1)",
            ),
        ),
        ("tests/ops/test_reference_in_functions.py",),
    ),
    Mutation(
        "XLA decodes the first word of a message, which is none",
        "tfgradcomp/compressors/index_coding.py",
        (Edit("return messages[:, 1:]\n    gap", "return messages\n    gap"),),
        ("tests/compressors/test_compiled.py", "-k", "xla and gaps", "-m", "not slow"),
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Tries mutations; returns the number of those that are not noticed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("name", nargs="?", default="", help="a part of the name")
    parser.add_argument(
        "--check", action="store_true", help="only say whether the texts are there"
    )
    arguments = parser.parse_args(argv)
    chosen = [one for one in MUTATIONS if arguments.name in one.name]
    if not chosen:
        parser.error(f"no mutation has {arguments.name!r} in its name")
    if arguments.check:
        results = [_texts_are_there(one) for one in chosen]
        return results.count(False)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        # A test that fails anyway would notice everything.
        broken = [
            tests
            for tests in dict.fromkeys(one.tests for one in chosen)
            if _run(tree, tests).returncode != _PASSED
        ]
        results = [_try(tree, one, broken) for one in chosen]
    print(f"{results.count(True)} of {len(results)} mutations are noticed")
    return results.count(False)


def mutated(text: str, mutation: Mutation) -> str:
    """Returns the text of a file with the fault in it.

    Raises:
        MutationError: If a text to be replaced is not there exactly once.
    """
    for old, new in mutation.edits:
        if (count := text.count(old)) != 1:
            raise MutationError(f"{mutation.path} has {count} times: {old.strip()!r}")
        text = text.replace(old, new)
    return text


def _texts_are_there(mutation):
    try:
        mutated((ROOT / mutation.path).read_text(), mutation)
    except (MutationError, OSError) as error:
        print(f"ERROR     {mutation.name}: {error}", flush=True)
        return False
    return True


def _try(tree, mutation, broken):
    """Prints what becomes of a mutation; returns whether it was noticed."""
    path = tree / mutation.path
    command = " ".join(mutation.tests)
    if mutation.tests in broken:
        print(
            f"ERROR     {mutation.name}: without it fails or finds no test: {command}"
        )
        return False
    if not _texts_are_there(mutation):
        return False
    original = path.read_text()
    path.write_text(mutated(original, mutation))
    try:
        done = _run(tree, mutation.tests)
    finally:
        path.write_text(original)
    if done.returncode == _FAILED:
        (failed,) = [
            line for line in done.stdout.splitlines() if line.startswith("FAILED")
        ][:1] or ["FAILED"]
        print(f"noticed   {mutation.name}: {failed[7:80]}", flush=True)
        return True
    print(f"SURVIVES  {mutation.name}: exit code {done.returncode} of {command}")
    return False


def _run(tree, tests):
    """Runs tests of a tree until the first failure."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0"]
        + ["-p", "no:cacheprovider", *tests],
        cwd=tree,
        # A file that changes twice in a second has old bytecode otherwise.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _copy(tree):
    """Copies the files that git knows, as they are now."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)


if __name__ == "__main__":
    sys.exit(main())
