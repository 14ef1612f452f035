#!/usr/bin/env python3
"""Collectives of quintet beside Open MPI and Gloo, in one sitting: all run in turns, round by round,
and what counts is the median of the rounds' ratios, per length.

    cargo build --release -p quintet-benches
    benches/beside_mpi.py --mpi mpi_bench.c [--gloo gloo_bench.py --python VENV/bin/python]

The peers are programs that take an operation (and Gloo's the number of ranks) and print one JSON object per
length, with bytes and us: the median over iterations of the slowest rank, a barrier before each iteration, out of place.
mpi_bench.c is compiled with mpicc (Debian: openmpi-bin, libopenmpi-dev). Ours is target/release/bench-collectives.
With more ranks than cores all sides run unbound.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

# Aims by (operation, ranks, way): (from bytes, to bytes, at least so many times as fast as Open MPI).
KIB, MIB = 1 << 10, 1 << 20
SHARED = [(0, 8, 1.0), (MIB, 4 * MIB, 3.5), (16 * MIB, 64 * MIB, 2.5)]
AIMS = {
    ("all_reduce", 2, "threads"): SHARED,
    ("all_reduce", 2, "shared"): SHARED,
    ("all_reduce", 2, "shm"): [(0, 8, 1 / 1.5), (MIB, 64 * MIB, 2.0)],
    ("all_reduce", 4, "threads"): [(0, 16, 0.5), (256 * KIB, 64 * MIB, 2.0)],
    ("all_reduce", 4, "shared"): [(0, 16, 0.5), (256 * KIB, 64 * MIB, 2.0)],
}
for way in ("threads", "shared", "shm"):
    AIMS["reduce_scatter", 2, way] = [(256 * KIB, 64 * MIB, 3.0)]
for op in ("all_gather", "all_to_all", "broadcast"):
    AIMS[op, 2, "shm"] = [(256 * KIB, 64 * MIB, 0.9)]
    AIMS[op, 2, "shared"] = AIMS[op, 2, "threads"] = [(256 * KIB, 64 * MIB, 1.2)]


def arguments():
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mpi", help="the peer's C source, or its binary")
    p.add_argument("--gloo", help="the peer's script")
    p.add_argument("--python", default=sys.executable, help="a Python that has torch")
    p.add_argument("--ours", default=str(target / "release" / "bench-collectives"))
    p.add_argument("--ops", nargs="*", default=["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
    p.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    p.add_argument("--ways", nargs="*", default=["threads", "shared", "shm"], help="also unix, tcp")
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()
    if not (a.mpi or a.gloo):
        p.error("--mpi or --gloo says what to run beside")
    return a


def lines(command):
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        sys.exit(f"beside_mpi: {' '.join(command)} failed ({done.returncode}): {done.stderr[-2000:]}")
    return {line["bytes"]: line for line in found}


def environment():
    return {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


def compiled(source, folder):
    if not source.endswith(".c"):
        return source
    binary = os.path.join(folder, "mpi_bench")
    subprocess.run(["mpicc", "-O3", "-o", binary, source], check=True)
    return binary


def commands(a, op, ranks, mpi):
    """Name and command of each way, the peers first."""
    if mpi:
        crowded = ["--oversubscribe", "--bind-to", "none"] if ranks > os.cpu_count() else ["--bind-to", "core"]
        yield "openmpi", ["mpirun", "-n", str(ranks), *crowded, mpi, op]
    if a.gloo:
        yield "gloo", [a.python, a.gloo, op, str(ranks)]
    for way in a.ways:
        yield way, [a.ours, "--op", op, "--ranks", str(ranks), "--way", way, *(["--triad"] if op == "all_reduce" else [])]


def verdict(op, ranks, way, size, ratio):
    for start, end, aim in AIMS.get((op, ranks, way), []):
        if start <= size <= end:
            return f"aim {aim:.2f} {'met' if ratio >= aim else 'MISSED'}"
    return ""


def main():
    a = arguments()
    with tempfile.TemporaryDirectory() as folder:
        mpi = compiled(a.mpi, folder) if a.mpi else None
        for ranks in a.ranks:
            for op in a.ops:
                table(a, op, ranks, list(commands(a, op, ranks, mpi)))


def table(a, op, ranks, ways):
    rounds = []
    for number in range(a.rounds):
        # Every second round backwards, so that nobody always runs on a machine warmed by another.
        order = ways if number % 2 == 0 else ways[::-1]
        rounds.append({name: lines(command) for name, command in order})
    peers = [name for name, _ in ways if name in ("openmpi", "gloo")]
    print(f"\n{op}, {ranks} ranks on {os.cpu_count()} cores, {a.rounds} rounds; us and ratios are medians over rounds")
    print(f"{'bytes':>10} {'way':>8} {'us':>11} {'GB/s':>8} {'of memory':>9}" + "".join(f" {'x ' + p:>10}" for p in peers))
    ratios = {}
    for size in sorted(rounds[0][ways[0][0]]):
        for name, _ in ways:
            of = lambda name, key: [r[name][size][key] for r in rounds if key in r[name].get(size, {})]
            us = statistics.median(of(name, "us"))
            share = of(name, "of_memory")
            share = f"{statistics.median(share):9.0%}" if share and size >= 16 * MIB else " " * 9
            row = f"{size:10} {name:>8} {us:11.1f} {size / us / 1e3:8.2f} {share}"
            for peer in peers:
                # A length of zero time is below what the clock tells.
                ratio = statistics.median(t / max(o, 0.05) for t, o in zip(of(peer, "us"), of(name, "us")))
                row += f" {ratio:9.2f}x"
                if peer == "openmpi" and name not in peers:
                    row += "  " + verdict(op, ranks, name, size, ratio)
                    ratios.setdefault(name, []).append((size, ratio))
            print(row, flush=True)
    for name, found in ratios.items():
        long = [ratio for size, ratio in found if size >= 256 * KIB]
        print(f"  {name}: geometric mean from 256 KiB on {statistics.geometric_mean(long):.2f}x Open MPI")


main()
