"""Puts faults into a copy of the package and says whether quick tests notice them.

    python -m tests.mutations              all of them; takes some minutes
    python -m tests.mutations residual     those whose name contains "residual"
    python -m tests.mutations --sample     with the cases that `make test` takes

`make mutations` runs it; the tests do not. No quick test holds the contract that a
surviving mutation breaks.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Exit codes of pytest; all others are errors.
_PASSED, _FAILED = 0, 1
_NOT_COPIED = (".git", ".venv", "build", "dist", "site", "__pycache__", "*.egg-info")


class Mutation(NamedTuple):
    """A fault.

    Attributes:
        name: A description in a few words.
        path: The file with the fault, from the root of the tree.
        edits: Texts that stand in the file exactly once, and their replacements.
        tests: Arguments of pytest: quick tests, of which one must fail.
    """

    name: str
    path: str
    edits: dict[str, str]
    tests: str


MUTATIONS = (
    Mutation(
        "the vote of summed signs is flipped",
        "tfgradcomp/servers/majority_vote.py",
        {"votes = tf.sign(net)": "votes = tf.sign(-net)"},
        "tests/transports -k 'direct_exchange and ragged and SignSGD'",
    ),
    Mutation(
        "error feedback drops its residual",
        "tfgradcomp/compressors/error_feedback.py",
        {"ops.add_scaled(x, residual, residuals.factor(self.decay, context))": "x"},
        "tests/optimizers/test_trajectories.py -k 'BinGrad and feedback'",
    ),
    Mutation(
        "the residual is not rescaled with the learning rate",
        "tfgradcomp/compressors/error_feedback.py",
        {"residual, residuals.factor(self.decay, context)": "residual, 1.0"},
        "tests/optimizers/test_trajectories.py -k 'BinGrad and feedback'",
    ),
    Mutation(
        "shards are cut inside of the chunks of a sum",
        "tfgradcomp/transports/sharding.py",
        {"math.lcm(CHUNK, *map": "math.lcm(1, *map"},
        "tests/transports -k 'direct_exchange and long and DistEF'",
    ),
    Mutation(
        "a shard draws the random numbers of the first",
        "tfgradcomp/transports/sharding.py",
        {"offset = context.offset + shard.begin": "offset = context.offset"},
        "tests/transports -k 'direct_exchange and (random or requantized)'",
    ),
    Mutation(
        "momentum is not multiplied",
        "tfgradcomp/compressors/momentum.py",
        {'self.momentum * state["momentum"] + (1': 'state["momentum"] + (1'},
        "tests/optimizers/test_trajectories.py -k Signum",
    ),
    Mutation(
        "Nesterov's momentum is not multiplied in one pass",
        "tfgradcomp/compressors/momentum.py",
        {"feedback, m, mu, layout": "feedback, m, 1.0, layout"},
        "tests/optimizers/test_trajectories.py -k DistEFBlockSGDM",
    ),
    Mutation(
        "workers do not share their scale",
        "tfgradcomp/compressors/ternary.py",
        {
            'return {"scale": self._scale_field(layout)} if self.share_scaler '
            "else {}": "return {}"
        },
        "tests/optimizers/test_trajectories.py -k TernGrad",
    ),
    Mutation(
        "a non-finite gradient raises no flag",
        "tfgradcomp/engine/exchange.py",
        {"is_finite = compressed.is_all_finite(x)": "is_finite = tf.constant(True)"},
        "tests/engine/test_step.py -k 'bad_gradient or bad_worker'",
    ),
    Mutation(
        "only the first worker's flag counts",
        "tfgradcomp/engine/step.py",
        {"tf.reduce_all(tf.equal(flags, 0))": "tf.equal(flags[0], 0)"},
        "tests/engine/test_step.py -k bad_worker",
    ),
    Mutation(
        "random numbers are those of the first step",
        "tfgradcomp/core/context.py",
        {"tf.cast(self.step, tf.int64) * 2**24 + worker": "worker"},
        "tests/compressors/test_random.py",
    ),
    Mutation(
        "weight decay goes through compression",
        "tfgradcomp/engine/gradient_bucket.py",
        {
            "x = self.flatten(gradients.values, gradients.scale)": (
                "rate = getattr(route.method.weight_decay, 'rate', 0.0)\n"
                "        rate = rate / gradients.scale\n"
                "        decayed = [\n"
                "            g if g is None else g + rate * tf.convert_to_tensor(w)\n"
                "            for g, w in zip(gradients.values, step.weights)\n"
                "        ]\n"
                "        x = self.flatten(decayed, gradients.scale)"
            ),
            "if method.weight_decay:": "if False:",
        },
        "tests/optimizers/test_trajectories.py -k 'decay or BlockSGDM'",
    ),
    Mutation(
        "the mean is divided by N + 1",
        "tfgradcomp/compressors/base.py",
        {"iter(workers.values()))))": "iter(workers.values()))) + 1)"},
        "tests/optimizers/test_trajectories.py -k identity",
    ),
    Mutation(
        "Keras' division by N is not undone",
        "tfgradcomp/engine/step.py",
        {"scale = self.collectives.num_workers / (inner": "scale = 1 / (inner"},
        "tests/optimizers/test_trajectories.py -k identity",
    ),
    Mutation(
        "the shards' replies come from the wrong workers",
        "tfgradcomp/transports/sharded.py",
        {"whole_reply(replies)": "whole_reply(tf.reverse(replies, [0]))"},
        "tests/transports -k 'direct_exchange and long and SignSGD'",
    ),
    Mutation(
        "a file's server state goes to the first shard",
        "tfgradcomp/engine/saved_leaf.py",
        {"route.owned_range(rank)": "route.owned_range(0)"},
        "tests/engine/test_buckets.py -k 'every_transport or any_transport'",
    ),
    Mutation(
        "a bucket's random numbers begin behind its padding",
        "tfgradcomp/engine/bucket_ranges.py",
        {"return self.begin - self.alignment_padding": "return self.begin"},
        "tests/engine/test_buckets.py -k 'any_bucketing and TernGrad'",
    ),
    Mutation(
        "a layout that varies has longer blocks",
        "tfgradcomp/core/layout.py",
        {"tf.range(0, size, block_size)": "tf.range(0, size, block_size + 1)"},
        "tests/transports/test_rows.py",
    ),
    Mutation(
        "XLA's sparse words stand for the next elements",
        "tfgradcomp/ops/reference/sparse.py",
        {"upper | tf.range(sent.shape[0])": "upper | (tf.range(sent.shape[0]) + 1)"},
        "tests/ops/test_reference_in_functions.py",
    ),
    Mutation(
        "XLA decodes the first word of a message, which is none",
        "tfgradcomp/compressors/index_coding.py",
        {"return messages[:, 1:]\n    gap": "return messages\n    gap"},
        "tests/compressors/test_compiled.py -k 'xla and gaps' -m 'not slow'",
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Tries mutations; returns the number of those that are not noticed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("name", nargs="?", default="", help="a part of the name")
    parser.add_argument(
        "--sample", action="store_true", help="run the sample of the files' tests"
    )
    args = parser.parse_args(argv)
    chosen = [mutation for mutation in MUTATIONS if args.name in mutation.name]
    if args.sample:
        chosen = [one._replace(tests=_sample_of(one.tests)) for one in chosen]
    if not chosen:
        parser.error(f"no mutation has {args.name!r} in its name")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        # A test that fails without a mutation would notice every mutation.
        broken = [
            tests
            for tests in dict.fromkeys(mutation.tests for mutation in chosen)
            if _run(tree, tests).returncode != _PASSED
        ]
        results = [_is_noticed(tree, mutation, broken) for mutation in chosen]
    print(f"{results.count(True)} of {len(results)} mutations are noticed")
    return results.count(False)


def _sample_of(tests):
    """Returns arguments for the sample of all tests in the files of others."""
    return f"{tests.partition(' ')[0]} --sample -m 'not slow'"


def mutated(text: str, mutation: Mutation) -> str:
    """Returns the text of a file with the fault in it.

    Raises:
        ValueError: If a text to be replaced does not occur exactly once.
    """
    for old, new in mutation.edits.items():
        if (count := text.count(old)) != 1:
            raise ValueError(f"{mutation.path} has {count} times: {old.strip()!r}")
        text = text.replace(old, new)
    return text


def _is_noticed(tree, mutation, broken):
    """Tries a mutation and prints the result."""
    if mutation.tests in broken:
        print(f"ERROR     {mutation.name}: fails without it, too: {mutation.tests}")
        return False
    path = tree / mutation.path
    original = path.read_text()
    path.write_text(mutated(original, mutation))
    try:
        done = _run(tree, mutation.tests)
    finally:
        path.write_text(original)
    if done.returncode != _FAILED:
        print(f"SURVIVES  {mutation.name}: {mutation.tests}", flush=True)
        return False
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    print(f"noticed   {mutation.name}: {''.join(failed[:1])[7:80]}", flush=True)
    return True


def _run(tree, tests):
    """Runs tests of a tree until the first failure."""
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *shlex.split(tests)],
        cwd=tree,
        # A file that changes twice in a second has old bytecode otherwise.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
