"""Federated training on slow links: the example, and the study's plan and table."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow_datasets", reason="needs tfgradcomp[examples]")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples/studies")]
import compare_methods  # noqa: E402
import federated_links  # noqa: E402
import federated_network  # noqa: E402
import federated_programs  # noqa: E402
import study  # noqa: E402


def test_each_image_is_that_of_one_client():
    labels = np.random.default_rng(0).integers(10, size=2000)
    divided = federated_links.parts(labels, clients=8, seed=1)
    assert sorted(np.concatenate(divided)) == [*range(2000)]
    assert min(map(len, divided)) >= 32
    again = federated_links.parts(labels, clients=8, seed=1)
    np.testing.assert_array_equal(divided[3], again[3])
    # Classes are divided unequally.
    counts = np.bincount(labels[divided[0]], minlength=10)
    assert counts.min() < counts.max() / 4


def test_the_plan_names_methods_and_clients():
    assert federated_programs.METHODS.keys() == {*federated_links.METHODS}
    for setting in (federated_links.FULL, federated_links.QUICK):
        assert len(setting.rates) in (0, setting.clients)
        for client, after in (setting.cut, setting.late):
            assert client < setting.clients and after < setting.rounds
    size = 4 * federated_programs.make_model().count_params() / 1e6
    assert round(size, 3) == federated_links.FIRST


def row(method, seed, accuracies):
    """A row of the file, with a round every two seconds."""
    curve = (f"{n}:{2 * n}:{value}" for n, value in enumerate(accuracies, 1))
    facts = {"up": 1.0, "down": 2.0, "compute": 0.5, "carried": "2:client-1+client-2"}
    return {"method": method, "seed": seed, "curve": " ".join(curve)} | facts


ROWS = [
    row("float32", 0, [50.0, 78.5, 79.0] + 8 * [80.0]),
    row("1 bit", 0, [50.0, 79.0, 79.5] + 8 * [79.0]),
]


def test_the_table_compares_with_float32():
    lines = federated_links.Rows(ROWS).table().splitlines()[2:]
    carried = "client-1: 1, client-2: 1"
    ends = "2.00 | 0.50 | 1.00 | 2.00 |"
    assert lines == [
        f"| float32 | 80.00 |  | {carried} | 22.00 | 6.00 | {ends}",
        f"| 1 bit | 79.00 | -1.00 | {carried} | 22.00 | 4.00 | {ends}",
    ]


def test_bytes_begin_with_the_first_weights():
    run = federated_links.Run(ROWS[0])
    found = run.megabytes()
    assert found[-1] == pytest.approx(3.0)
    assert 2 * found[0] - found[1] == pytest.approx(federated_links.FIRST)


def test_page_and_figure_have_a_place(tmp_path, monkeypatch):
    text = (ROOT / "docs" / federated_links.PAGE).read_text()
    changed = compare_methods.replace_table(text, "a table", "links")
    assert "<!-- links: begin -->\na table\n" in changed
    (tmp_path / "docs/studies").mkdir(parents=True)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    federated_links.Rows(ROWS).draw()
    drawn = (tmp_path / "docs/studies/federated.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")


@pytest.mark.parametrize("script", [federated_network, federated_links])
def test_scripts_say_what_they_need(script, monkeypatch, tmp_path):
    # Without `ip`, as without root, there are no namespaces.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(script, "exit_on_signals", lambda: None)
    monkeypatch.setattr(
        study, "complete", lambda *given, **named: given[2]({"seed": 0})
    )
    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(SystemExit, match="needs Linux, root"):
        script.main()


@pytest.mark.slow
def test_the_example_trains_on_links_and_leaves_no_namespace():
    try:
        with federated_network.network(["10mbit"], "0ms"):
            pass
    except federated_network.Unavailable as error:
        pytest.skip(str(error))
    script = [sys.executable, ROOT / "examples/federated_network.py"]
    with subprocess.Popen(
        [*script, "--rounds", "5", "--rates", "10mbit", "50mbit"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=280)
    assert process.returncode == 0
    assert "client-1: " in output and "accuracy 9" in output
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    assert f"tfgradcomp-{process.pid}-" not in names.stdout
