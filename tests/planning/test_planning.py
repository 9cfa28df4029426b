"""Forecasts against numbers computed by hand, and the command line."""

import csv
import io
import json
import subprocess
import sys

import keras
import pytest

import tfgradcomp
from tfgradcomp import planning
from tfgradcomp.collectives import CollectiveCall
from tfgradcomp.core import Layout
from tfgradcomp.planning import arithmetic, command, output
from tfgradcomp.planning.forecasts import no_arithmetic
from tfgradcomp.planning.measured import find_model
from tfgradcomp.transports import AllGather, Costs, LinearCost, Sharded

GIGABIT = planning.Link(1e9, 0.0, efficiency=1.0)
# Only the link takes time.
IDEAL = planning.Profile(planning.NO_SOFTWARE, no_arithmetic)
# Arguments of the command line, after the model.
GIVEN = ("--bandwidth", "1gbit", "--compute-ms", "5", "--workers", "2")


@pytest.fixture(autouse=True)
def arithmetic_is_not_measured(monkeypatch):
    # A measurement takes seconds.
    monkeypatch.setattr(arithmetic, "_seconds", lambda *of: 0.0)


def test_arithmetic_grows_with_elements_and_with_payloads_to_decode(monkeypatch):
    asked = []

    def seconds(kind, method, num_workers, shapes):
        asked.append(shapes)
        return 10.0 + num_workers

    monkeypatch.setattr(arithmetic, "_seconds", seconds)
    sizes = [7, 1 << 21, 9, 1 << 22, 8, 1 << 21]
    method, layout = tfgradcomp.TernGrad("sgd").method, Layout.from_sizes(sizes)
    # Every third variable by size is measured, the largest among them.
    measured = 9 + (1 << 22)
    share = layout.size / measured
    given = method, layout, 4
    assert arithmetic.measured_arithmetic(Sharded, *given) == pytest.approx(12 * share)
    # 12 s on two workers, 18 s on eight.
    all_decode = arithmetic.measured_arithmetic(AllGather, *given)
    assert all_decode == pytest.approx((12 + 2 * 6 / 6) * share)
    assert {*asked} == {((9,), (1 << 22,))}


def test_arithmetic_is_measured_without_a_network(monkeypatch):
    monkeypatch.undo()
    method = tfgradcomp.methods.orq(17)
    found = arithmetic._seconds(Sharded, method, 2, ((400, 300), (300,)))
    assert 0 < found < 60


def test_the_former_name_of_a_plan_works():
    assert planning.Plan is planning.TrainingPlan


def test_buckets_travel_while_others_are_encoded():
    plan = planning.plan(
        [(4096, 1024)] * 24,
        0.1,
        planning.Link(1e8, 0.0, efficiency=1.0),
        [2],
        methods=["SignSGD"],
        profile=planning.Profile(planning.NO_SOFTWARE, lambda *of: 0.8),
    )
    best = plan.quickest(2)[1]
    # Nine buckets: half of 0.8 s of arithmetic is encoding; the last hides nothing.
    assert best.buckets == 9 and best.link_seconds > 0.8
    assert best.hidden_seconds == pytest.approx(0.4 * 8 / 9)
    expected = 0.1 + 0.8 + best.link_seconds - 0.4 * 8 / 9
    assert best.step_seconds == pytest.approx(expected)
    # Float32 is one all-reduce.
    assert plan.float32(2).hidden_seconds == 0


def forecast_of(plan, *key):
    """The forecast of a method, a transport and a number of workers."""
    forecasts = plan.forecasts
    [found] = [f for f in forecasts if (f.method, f.transport, f.workers) == key]
    return found


def test_the_link_of_collectives_by_hand():
    # 1000 words, 4 workers, one a node: a ring sum passes each word 2 * 3/4 times.
    assert GIGABIT.words(CollectiveCall("sum", 1000), 4) == 1500
    assert GIGABIT.words(CollectiveCall("max", 1000), 4) == 1500
    assert GIGABIT.words(CollectiveCall("gather", 1000), 4) == 3000
    assert GIGABIT.words(CollectiveCall("all_to_all", 1000), 4) == 750
    assert GIGABIT.seconds(1500) == 1500 * 32 / 1e9
    assert planning.Link(1e8, efficiency=0.5).seconds(1) == 32 / 0.5e8
    # A message for each round: 2 * 3 of a sum, 3 of a gather, one of an all-to-all.
    late = planning.Link(1e9, latency=0.25)
    kinds = "sum", "gather", "all_to_all"
    assert [late.waiting(CollectiveCall(k, 1), 4) for k in kinds] == [1.5, 0.75, 0.25]


def test_devices_of_a_node_share_its_link():
    nodes = planning.Link(1e9, 0.25, devices_per_node=4)
    # A ring leaves the node once; in an all-to-all 4 workers send 4 rows of 100 words.
    assert nodes.words(CollectiveCall("sum", 800), 8) == 2 * 7 / 8 * 800
    assert nodes.words(CollectiveCall("all_to_all", 800), 8) == 4 * 4 * 100
    for kind in ("sum", "all_to_all"):
        assert nodes.words(CollectiveCall(kind, 800), 4) == 0
        assert nodes.waiting(CollectiveCall(kind, 800), 4) == 0


def test_measured_software_holds_for_any_number_of_workers():
    costs = Costs(LinearCost(3.0, 0.6), LinearCost(5.0, 0.75), LinearCost(12.0, 1.5))
    software = planning.software_of(costs, 4)
    for kind in Costs._fields:
        cost = getattr(costs, kind)
        expected = cost.latency + 1000 * cost.per_word
        assert software.seconds(CollectiveCall(kind, 1000), 4) == pytest.approx(
            expected
        )
    # On 2 workers: 2 rounds of 2 s, and each word once instead of 1.5 times.
    assert software.seconds(CollectiveCall("max", 1000), 2) == pytest.approx(
        2 * 2.0 + 1000
    )


def test_forecasts_of_float32_and_of_signs_by_hand():
    shapes = [(1000, 320), (320,)]
    plan = planning.plan(
        shapes, 0.1, GIGABIT, [1, 4], methods=["SignSGD"], profile=IDEAL, examples=10
    )
    assert forecast_of(plan, "float32", "", 1).throughput == pytest.approx(100)
    plain = forecast_of(plan, "float32", "all_reduce", 4)
    assert plain.bytes_sent == 1.5 * 4 * 320_320
    assert plain.step_seconds == pytest.approx(0.1 + 1.5 * 32 * 320_320 / 1e9)
    # A bit per element and a flag; the small bias by a ring, 3 digits per worker.
    signs = forecast_of(plan, "SignSGD", "all_gather", 4)
    words = 3 * (320_000 / 32 + 1) + 1.5 * (320 + 3 * 4)
    assert signs.bytes_sent == 4 * words
    assert signs.step_seconds == pytest.approx(0.1 + 32 * words / 1e9)
    assert signs.speedup == pytest.approx(0.4 / signs.step_seconds)
    assert signs.efficiency == pytest.approx(signs.speedup / 4)
    assert plan.over_float32(signs) == plain.step_seconds / signs.step_seconds


def test_float32_travels_by_software_of_its_own():
    def plan(software, stock=None):
        profile = planning.Profile(software, no_arithmetic, stock=stock)
        shapes = [(1000, 320)]
        return planning.plan(
            shapes, 0.1, GIGABIT, [4], methods=["SignSGD"], profile=profile
        )

    float32, *signs = plan(planning.TCP, planning.GRPC).forecasts
    of_grpc, *signs_of_grpc = plan(planning.GRPC).forecasts
    assert float32 == of_grpc
    assert signs == [*plan(planning.TCP).forecasts[1:]]
    # Quicker with each of the three transports.
    pairs = zip(signs, signs_of_grpc, strict=True)
    assert [o.step_seconds < g.step_seconds for o, g in pairs] == [True] * 3
    default = planning.plan([(9,)], 0.1, GIGABIT, [2], methods=["SignSGD"])
    assert default.software == planning.TCP


def test_local_steps_share_an_exchange():
    shapes = [(1000, 320)]
    every_step, every_eighth = (
        planning.plan(shapes, 0.1, GIGABIT, [4], methods=[], local_steps=h).float32(4)
        for h in (1, 8)
    )
    assert every_eighth.bytes_per_step == every_step.bytes_per_step / 8
    exchange = every_step.step_seconds - 0.1
    assert every_eighth.step_seconds == pytest.approx(0.1 + exchange / 8)


def test_a_delay_hides_half_of_the_shorter_of_transfer_and_step():
    shapes = [(1000, 320)]
    for compute in (0.001, 10.0):
        plans = [
            planning.plan(
                shapes, compute, GIGABIT, [4], methods=[], local_steps=8, delay=d
            )
            for d in (0, 1)
        ]
        plain, delayed = (one.float32(4) for one in plans)
        on_the_way = plain.waiting_seconds + plain.link_seconds
        saved = 8 * (plain.step_seconds - delayed.step_seconds)
        assert saved == pytest.approx(min(compute, on_the_way) / 2)
        assert plans[1].break_even(delayed) is None


def test_at_the_break_even_rate_float32_is_as_quick():
    slow = planning.Profile(planning.GRPC, lambda *_: 2.0)

    def plan(link):
        shapes = planning.MODELS["alexnet"]()
        methods = ["SignSGD", "TernGrad"]
        return planning.plan(shapes, 0.1, link, [4], methods=methods, profile=slow)

    first = plan(planning.Link(1e7))
    best = first.best(4)
    assert best.method != "float32"
    there = plan(planning.Link(first.break_even(best)))
    again = forecast_of(there, best.method, best.transport, 4)
    assert again.step_seconds == pytest.approx(there.float32(4).step_seconds)
    assert plan(planning.Link(2 * first.break_even(best))).best(4).method == "float32"
    # If a method's other costs are lower too, float32 never wins.
    free = planning.plan([(1000, 320)], 0.1, GIGABIT, [4], methods=["SignSGD"])
    assert free.break_even(free.best(4)) is None


def test_sparse_methods_pay_while_the_ratio_is_above_half_the_workers():
    def plan(ratio):
        given = {"methods": ["VarianceBased"], "ratio": ratio, "profile": IDEAL}
        return planning.plan([(1000, 1000)], 0.1, GIGABIT, [16], **given)

    # The paper: at least 2 (p - 1) c / p^2 times as fast, without the computation.
    for ratio in (4, 8, 64):
        sparse = forecast_of(plan(ratio), "VarianceBased", "all_gather", 16)
        exact = 2 * 15 * ratio / 16**2
        found = plan(ratio).float32(16).link_seconds / sparse.link_seconds
        # The all-gather's share, (p - 1) / p, and the flags.
        assert found == pytest.approx(exact * 16 / 15, rel=1e-3)
    assert "below 16/2 = 8" in plan(4).warning()
    assert plan(8).warning() is None
    assert plan(None).best(16).method == "float32"


def test_the_speed_up_of_terngrad_on_eight_gpus_next_to_the_papers():
    # Section 5: AlexNet, 2 nodes of 4 GPUs, 1 Gbit/s, 128 images per GPU. The paper
    # gives no computing time; 185 ms is a public figure for that GPU.
    nodes = planning.Link(1e9, 0.0, devices_per_node=4, efficiency=1.0)

    def speedup(compute):
        shapes = planning.MODELS["alexnet"]()
        plan = planning.plan(
            shapes, compute, nodes, [8], methods=["TernGrad"], profile=IDEAL
        )
        ring = 2 * 7 / 8 * 32 * 60_965_224 / 1e9
        assert plan.float32(8).exchange_seconds == pytest.approx(ring)
        return plan.over_float32(plan.quickest(8)[1])

    assert speedup(0.185) == pytest.approx(5.7, abs=0.1)
    # With almost a second more of computing, the speed-up is that of the paper.
    assert speedup(1.03) == pytest.approx(3.04, abs=0.05)


def test_a_forecast_of_every_method_and_transport_that_can_carry_it(capsys):
    assert command.main(["lenet", *GIVEN, "--workers", "1,4", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    found = {(row["method"], row["transport"]) for row in rows}
    for method in ("TernGrad", "SignSGD", "HalfPrecision"):
        for transport in ("all_gather", "all_reduce", "sharded"):
            assert (method, transport) in found
    assert ("ORQ", "all_reduce") not in found
    assert not any(method == "VarianceBased" for method, _ in found)
    for row in rows:
        parts = ("compute", "arithmetic", "software", "waiting", "link")
        step_ms = sum(float(row[f"{part}_ms"]) for part in parts)
        assert float(row["step_ms"]) == pytest.approx(step_ms)
        throughput = 1e3 * int(row["workers"]) / step_ms
        assert float(row["throughput"]) == pytest.approx(throughput)


def test_table_json_and_plot(capsys, tmp_path):
    arguments = ["lenet", "--bandwidth", "100mbit", "--compute-ms", "5"]
    arguments += ["--workers", "1,2,8", "--methods", "SignSGD,TernGrad", "--ratio", "3"]
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("lenet: 431,080 parameters; 5 ms a step without exchange;")
    assert "Best on 8 workers: SignSGD by sharded, " in text
    assert "Break-even: none; SignSGD by sharded is quicker than float32" in text
    assert "below 8/2 = 4 that takes longer" in text
    assert "Assumed: messages on CPUs travel by TCP, float32 by TensorFlow's" in text
    assert "\nHalfPrecision " in text and "Left out" not in text
    assert command.main([*arguments, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["link"]["bandwidth"] == 1e8
    assert {forecast["workers"] for forecast in read["forecasts"]} == {1, 2, 8}
    assert read["best"]["8"]["method"] == "SignSGD"
    path = tmp_path / "plan.png"
    assert command.main([*arguments, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_numbers_are_for_people():
    values = (9_903.4, 13_330.0, 99.96, 1.5, 0.0625)
    expected = ["9,903", "13,330", "100", "1.5", "0.0625"]
    assert [output.number(value) for value in values] == expected


def test_every_method_is_planned_or_named_as_left_out(capsys):
    given = {"profile": IDEAL, "workers": [4]}
    plan = planning.plan([(1000, 320)], 0.1, GIGABIT, **given)
    sparse = {"VarianceBased", "Strom", "Hybrid"}
    others = {"CompressedOptimizer", "LocalSteps"}
    found = {forecast.method for forecast in plan.forecasts}
    assert {*plan.left_out} == sparse | others
    assert found | {*plan.left_out} == {*tfgradcomp.optimizers.__all__, "float32"}
    with_ratio = planning.plan([(1000, 320)], 0.1, GIGABIT, ratio=32.0, **given)
    assert {*with_ratio.left_out} == others
    assert command.main(["lenet", *GIVEN, "--methods", "Strom,OneBitAdam"]) == 0
    streams = capsys.readouterr()
    assert "Left out: Strom (the number of elements" in streams.out
    assert streams.err.startswith("tfgradcomp-plan: measures each method here:\n Half")


@pytest.mark.parametrize(
    "optimizer, one_bit", [("Adam", "OneBitAdam"), ("SGD", "DistEFBlockSGD")]
)
def test_the_command_says_what_auto_would_choose(capsys, optimizer, one_bit):
    given = [*GIVEN, "--methods", "SignSGD", "--optimizer", optimizer]
    assert command.main(["lenet", *given, "--risk", "high"]) == 0
    *_, decision = capsys.readouterr().out.split("risk=")
    assert decision.startswith("'high', 2 workers, links of 1 Gbit/s, 5.0 ms a step")
    (chosen,) = [line for line in decision.splitlines() if line.startswith("*")]
    assert one_bit in chosen


def test_a_plot_without_matplotlib_raises(monkeypatch):
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib.*Received: plot="):
        output.plot("x.png", None, "lenet")


def test_a_model_is_measured_and_planned(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_models.py").write_text(
        "import keras\n"
        "def build():\n"
        "    layers = [keras.Input((8,)), keras.layers.Dense(200)]\n"
        "    return keras.Sequential([*layers, keras.layers.Dense(10)])\n"
        "def unbuilt():\n"
        "    return keras.Sequential([keras.layers.Dense(10)])\n"
    )
    monkeypatch.chdir(tmp_path)
    given = ["my_models:build", "--bandwidth", "1gbit", "--measure"]
    assert command.main([*given, "--workers", "2", "--methods", "SignSGD"]) == 0
    assert f"{8 * 200 + 200 + 200 * 10 + 10:,} parameters" in capsys.readouterr().out
    shapes, model = find_model("my_models:build")
    model.save("saved.keras")
    assert find_model("saved.keras")[0] == shapes
    with pytest.raises(ValueError, match="no trainable variables"):
        find_model("my_models:unbuilt")
    with pytest.raises(ValueError, match="known shapes.*Received: shape="):
        planning.measure_compute(
            keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(2)]), 4
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lenet", "--bandwidth", "1gbit"), "one of the arguments --compute-ms"),
        (("lenet", "--compute-ms", "5"), "required: --bandwidth"),
        (("lenet", *GIVEN, "--bandwidth", "fast"), "write a rate as 1gbit"),
        (("lenet", *GIVEN, "--latency", "1"), "write a duration as 0.1ms"),
        (("lenet", *GIVEN, "--workers", "2,x"), "give 1 or more"),
        (("lenet", *GIVEN, "--compute-ms", "0"), "milliseconds, more than 0"),
        (("lenet", *GIVEN, "--link-efficiency", "2"), "give 0.01 to 1"),
        (("resnet", *GIVEN), "one of ['lenet', "),
        (("none.keras", *GIVEN), "file does not exist"),
        (("no_module:f", *GIVEN), "module:function"),
        (("lenet", *GIVEN, "--methods", "Sign"), "methods must be some of"),
        (("lenet", "--bandwidth", "1gbit", "--measure"), "list of shapes"),
    ],
)
def test_errors_print_a_message_and_exit_with_2(arguments, message, capsys):
    try:
        code = command.main([*arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_seconds": 0.0}, "compute_seconds must be positive"),
        ({"ratio": 0.5}, "ratio must be 1 or more"),
        ({"workers": [0]}, "workers"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": 2, "delay": 2}, "delay"),
    ],
)
def test_arguments_out_of_range_raise(change, message):
    given = {"compute_seconds": 1.0, "link": GIGABIT, "workers": [2], **change}
    with pytest.raises(ValueError, match=f"{message}.*Received: "):
        planning.plan([(10,)], **given)


def test_help_needs_no_tensorflow():
    code = (
        "import sys\n"
        "from tfgradcomp.planning.command import main\n"
        "try: main(['--help'])\n"
        "finally: assert 'tensorflow' not in sys.modules, 'tensorflow'"
    )
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--devices-per-node" in done.stdout
