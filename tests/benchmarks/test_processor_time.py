"""Samples of perf count as time of the library, or of another file, they were in."""

import pytest

from tests.benchmarks.scripts import import_script

script = import_script("processor_time")


def test_samples_share_the_processor_time_by_the_file_they_were_in():
    of_one = {"libtfgradcomp_ops-tf2.21.0-x86_64.so": 30, "[kernel.kallsyms]": 10}
    of_other = {
        "libtensorflow_framework.so.2": 20,
        "_pywrap_tensorflow_common.so": 20,
        "libc.so.6": 10,
        "python3.11": 10,
    }
    row = script.row_of(
        "SignSGD",
        [
            {"seconds": [0.1, 0.2, 0.1], "busy": [0.02, 0.04], "samples": of_one},
            {"seconds": [0.1, 0.1, 0.1], "busy": [0.05, 0.05], "samples": of_other},
        ],
    )
    assert row.pop("method") == "SignSGD"
    assert row == pytest.approx(
        {
            "workers": 2,
            "step_ms": 100,
            "busy_ms": 40,
            "own operations": 12,
            "TensorFlow": 16,
            "C library": 4,
            "kernel": 4,
            "Python and others": 4,
        }
    )
