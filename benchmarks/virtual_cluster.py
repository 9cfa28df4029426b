"""Time the exchange of gradients between hosts with links of a given rate.

    sudo python benchmarks/virtual_cluster.py
    sudo python benchmarks/virtual_cluster.py --rate 100mbit --workload lenet \
        --workers 2 --output /tmp/cluster

The measurement of `exchange.py`, each worker in a network namespace of its own
(`cluster.py`), so that the time on the wire is that of real links. The interfaces count
the bytes of each step, next to what `optimizer.traffic` declares.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cluster
import measuring
import speed_page
from processes import exit_on_signals
from report import plot_bars, write_csv, write_table

from tfgradcomp.planning.network import bits_per_second

HERE = Path(__file__).resolve().parent
COLUMNS = (*measuring.COLUMNS, "rate", "delay", "sent", "received")
PORT = 4000


def commands(hosts: list[cluster.Host]):
    """Returns the function that starts a script on every host."""
    addresses = ",".join(f"{host.address}:{PORT}" for host in hosts)
    launch = [sys.executable, "-m", "tfgradcomp.launch", "--cluster", addresses]
    return lambda *script: [
        host.command(*launch, "--index", str(index), *script)
        for index, host in enumerate(hosts)
    ]


def table(rows: list[dict]) -> list[str]:
    """Returns the lines of the table."""
    titles = ["framework", "gradients travel by", "transport", "step, ms"]
    titles += ["nothing exchanged, ms", "exchange, ms", "of TensorFlow's float32"]
    titles += ["MB sent", "MB received", "declared", "wire, ms", *measuring.FLOORS]

    def cells(row):
        declared, ratio = row["declared_bytes_received"], row.get("of_float32")
        return [
            *(row[name] for name in ("framework", "variant", "transport")),
            *(row[name] for name in ("step_ms", "plain_ms", "exchange_ms")),
            None if ratio is None else f"{ratio:.2f}",
            *(f"{row[name] / 1e6:.2f}" for name in ("sent", "received")),
            None if declared is None else f"{declared / 1e6:.2f}",
            row.get("wire_ms"),
            *measuring.floors(row),
        ]

    return measuring.markdown(titles, [cells(row) for row in rows])


def rate_of(text: str) -> str:
    """Returns a rate as `tc` takes it."""
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from None
    return text


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measuring.add_arguments(parser, rounds=5)
    add = parser.add_argument
    add("--rate", type=rate_of, default="1gbit", help="of each link, each direction")
    add("--delay", default="0ms", help="of each packet on its way out of a host")
    args = parser.parse_args()
    if args.workers < 2:
        parser.error(f"--workers is {args.workers}: give 2 or more")
    exit_on_signals()
    rate = bits_per_second(args.rate)
    try:
        with cluster.virtual_cluster(args.workers, args.rate, args.delay) as hosts:
            # A second's worth.
            got = cluster.tcp_rate(hosts[0], hosts[1], round(rate / 8))
            rows, peak = measuring.measure(
                args, args.workers, commands(hosts), cluster.INTERFACE, rate
            )
    except RuntimeError as error:
        sys.exit(f"virtual_cluster.py: {error}")
    for row in rows:
        row |= {"rate": args.rate, "delay": args.delay}
    folder = args.output or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    file = f"virtual_cluster_{args.rate}"
    if args.keep:
        rows = measuring.keep(folder / f"{file}.csv", rows)
    line = (
        f"{measuring.head(rows, peak)} Links of {args.rate}, delay {args.delay}; "
        f"a plain TCP connection reached {got / 1e6:.0f} Mbit/s."
    )
    lines = [line, "", *table(rows)]
    write_csv(folder / f"{file}.csv", COLUMNS, rows)
    plot_bars(folder / f"{file}.png", rows, measuring.label)
    print("\n".join(lines))
    if args.output is not None:
        (folder / f"{file}.md").write_text("\n".join([*lines, ""]))
        return
    name = f"virtual cluster {args.rate}"
    write_table(HERE / "README.md", name, lines)
    write_table(speed_page.PAGE, name, speed_page.summary(rows))


if __name__ == "__main__":
    main()
