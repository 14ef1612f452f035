#!/usr/bin/env python3
"""Collectives of quintet beside Open MPI and Gloo, in one sitting: all run in turns, round by round,
and what counts is the median of the rounds' ratios, per length.

    cargo build --release -p quintet-benches
    benches/beside_mpi.py [--rounds 5]

The peers are programs that take an operation (and Gloo's the number of ranks) and print one JSON object per
length, with bytes and us: the median over iterations of the slowest rank, a barrier before each iteration, out of place.
They are mpi_bench.c (compiled with mpicc: Debian's openmpi-bin, libopenmpi-dev) and gloo_bench.py (PyTorch, which is
installed from PyPI into a virtual environment where there is none; that takes 5 GB) in the folder --peers. Which of them is
missing is said and left out. Ours is target/release/bench-collectives. With more ranks than cores all sides run unbound.
Before each command it is measured how long a cache line takes between two cores: where a virtual machine's cores are moved
about, that differs severalfold, and the ratios with it.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

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
# The same, against Gloo.
SOCKETS = ("tcp", "unix")
for way in SOCKETS:
    AIMS["all_reduce", 2, way] = [(0, 16 * KIB, 10.0), (MIB, 4 * MIB, 3.0), (16 * MIB, 64 * MIB, 2.0)]
# Of memory: the share of a triad that long all_reduces reach.
OF_MEMORY = {"threads": 0.8, "shm": 0.6}

# What runs unless something else is asked for.
OPS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
TABLES = [("all_reduce", 2), ("all_reduce", 4)] + [(op, 2) for op in OPS[1:]]


def arguments():
    root = pathlib.Path(__file__).resolve().parent.parent
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peers", default=str(root.parent / "shared" / "peers"), help="the folder with the peers")
    p.add_argument("--python", help="a Python that has torch (default: one in a virtual environment made for this)")
    p.add_argument("--without-gloo", action="store_true")
    p.add_argument("--ours", default=str(target / "release" / "bench-collectives"))
    p.add_argument("--ops", nargs="*", choices=OPS, default=OPS)
    p.add_argument("--ranks", nargs="*", type=int, help="default: 2, and 4 for all_reduce")
    p.add_argument("--ways", nargs="*", default=["threads", "shared", "shm", *SOCKETS])
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()
    a.venv = target / "torch"
    return a


def gloo(a):
    """The command of Gloo's side, or none."""
    script = os.path.join(a.peers, "gloo_bench.py")
    if a.without_gloo or not os.path.exists(script):
        return None
    python = a.python or str(a.venv / "bin" / "python")
    has = lambda: subprocess.run([python, "-c", "import torch.distributed"], capture_output=True).returncode == 0
    if a.python is None and not (os.path.exists(python) and has()):
        print("installing torch ...", file=sys.stderr)
        made = subprocess.run([sys.executable, "-m", "venv", str(a.venv)], capture_output=True).returncode == 0
        made and subprocess.run([python, "-m", "pip", "install", "-q", "torch", "numpy"], capture_output=True)
    if os.path.exists(python) and has():
        return [python, script]
    print("without Gloo: torch cannot be had", file=sys.stderr)
    return None


def lines(command):
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        sys.exit(f"beside_mpi: {' '.join(command)} failed ({done.returncode}): {done.stderr[-2000:]}")
    return {line["bytes"]: line for line in found}


def between_cores(a, looks):
    """One look more at how long a cache line takes from core to core, in nanoseconds."""
    if len(os.sched_getaffinity(0)) > 1:
        run = subprocess.run([a.ours, "--line"], capture_output=True, text=True, check=True)
        looks.append(json.loads(run.stdout)["line_ns"])


def environment():
    return {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


def mpi(a, folder):
    """The binary of Open MPI's side, or none."""
    source = os.path.join(a.peers, "mpi_bench.c")
    if not os.path.exists(source) or not (shutil.which("mpicc") and shutil.which("mpirun")):
        print("without Open MPI: no mpi_bench.c, mpicc or mpirun", file=sys.stderr)
        return None
    binary, text = os.path.join(folder, "mpi_bench"), pathlib.Path(source).read_text()
    # Tenths of a microsecond are too coarse for 8 bytes.
    finer = pathlib.Path(folder, "mpi_bench.c")
    finer.write_text(text.replace('\\"us\\":%.1f', '\\"us\\":%.3f'))
    subprocess.run(["mpicc", "-O3", "-w", "-o", binary, str(finer)], check=True)
    return binary


def commands(a, op, ranks, binary, torch):
    """Name and command of each way, the peers first."""
    if binary:
        crowded = ["--oversubscribe", "--bind-to", "none"] if ranks > os.cpu_count() else ["--bind-to", "core"]
        yield "openmpi", ["mpirun", "-n", str(ranks), *crowded, binary, op]
    sockets = op == "all_reduce" and ranks == 2
    if torch and sockets:
        yield "gloo", [*torch, op, str(ranks)]
    for way in a.ways:
        if way in SOCKETS and not sockets:
            continue
        triad = ["--triad"] if op == "all_reduce" and way not in SOCKETS else []
        yield way, [a.ours, "--op", op, "--ranks", str(ranks), "--way", way, *triad]


def verdict(op, ranks, way, size, ratio):
    for start, end, aim in AIMS.get((op, ranks, way), []):
        if start <= size <= end:
            return f"aim {aim:.2f} {'met' if ratio >= aim else 'MISSED'}"
    return ""


def main():
    a = arguments()
    begin = time.monotonic()
    torch = gloo(a)
    with tempfile.TemporaryDirectory() as folder:
        binary = mpi(a, folder)
        if not (binary or torch):
            sys.exit("beside_mpi: no peer to run beside")
        tables = [(op, n) for op in a.ops for n in a.ranks] if a.ranks else [t for t in TABLES if t[0] in a.ops]
        missed, looks = [], []
        for op, ranks in tables:
            missed += table(a, op, ranks, list(commands(a, op, ranks, binary, torch)), looks)
    if looks:
        low, _, high = statistics.quantiles(looks * 2, n=4)
        far = sum(look > 3 * min(looks) for look in looks) / len(looks)
        print(f"\na cache line between two cores: {min(looks):.0f} to {max(looks):.0f} ns, the middle half {low:.0f} to {high:.0f}; "
              f"over three times the least in {far:.0%} of {len(looks)} looks")
    print(f"\n{time.monotonic() - begin:.0f} s; {len(missed)} aims missed" + "".join(f"\n  {m}" for m in missed))


def table(a, op, ranks, ways, looks):
    rounds, missed = [], []
    for number in range(a.rounds):
        # Every second round backwards, so that nobody always runs on a machine warmed by another.
        order = ways if number % 2 == 0 else ways[::-1]
        rounds.append({})
        for name, command in order:
            between_cores(a, looks)
            rounds[-1][name] = lines(command)
    peers = [name for name, _ in ways if name in ("openmpi", "gloo")]
    print(f"\n{op}, {ranks} ranks on {os.cpu_count()} cores, {a.rounds} rounds; us and ratios are medians over rounds")
    print(f"{'bytes':>10} {'way':>8} {'us':>11} {'GB/s':>8} {'of memory':>9}" + "".join(f" {'x ' + p:>10}" for p in peers))
    ratios = {}
    for size in sorted(rounds[0][ways[0][0]]):
        for name, _ in ways:
            of = lambda name, key: [r[name][size][key] for r in rounds if key in r[name].get(size, {})]
            us = statistics.median(of(name, "us"))
            share = of(name, "of_memory")
            share = statistics.median(share) if share and size >= 16 * MIB else None
            row = f"{size:10} {name:>8} {us:11.2f} {size / us / 1e3:8.2f} " + (f"{share:9.0%}" if share else " " * 9)
            said = ""
            if share and name in OF_MEMORY and ranks <= os.cpu_count():
                said = f" of memory: aim {OF_MEMORY[name]:.0%} {'met' if share >= OF_MEMORY[name] else 'MISSED'}"
            for peer in peers:
                # A length of zero time is below what the clock tells.
                ratio = statistics.median(t / max(o, 0.01) for t, o in zip(of(peer, "us"), of(name, "us")))
                row += f" {ratio:9.2f}x"
                if name in peers:
                    continue
                if peer == "openmpi":
                    ratios.setdefault(name, []).append((size, ratio))
                if peer == ("gloo" if name in SOCKETS else "openmpi"):
                    said = "  " + verdict(op, ranks, name, size, ratio) + said
            if "MISSED" in said:
                missed.append(f"{op}, {ranks} ranks, {name}, {size} bytes:{said}")
            print((row + said).rstrip(), flush=True)
    for name, found in ratios.items():
        long = [ratio for size, ratio in found if size >= 256 * KIB]
        mean = statistics.geometric_mean(long)
        said = ""
        if op == "all_reduce" and ranks == 4 and name in ("threads", "shared"):
            said = f"  aim 3.00 {'met' if mean >= 3 else 'MISSED'}"
            missed += [f"{op}, 4 ranks, {name}, geometric mean: {mean:.2f}"] if mean < 3 else []
        print(f"  {name}: geometric mean from 256 KiB on {mean:.2f}x Open MPI{said}")
    return missed


main()
