#!/usr/bin/env python3
"""Training throughput of quintet beside a peer's, in one sitting: the two run in turns, round by
round, and what counts is the median of the rounds' ratios.

    cargo build --release -p quintet-benches
    benches/beside_torch.py --python VENV/bin/python --peer torch_llama.py

The peer is a script that takes --config, --steps and --threads and prints as its last line one JSON
object with tok_s_best and tok_s_median. --python and --peer may also come from the environment:
QUINTET_PEER_PYTHON, QUINTET_PEER. Needs nothing but Python's own library.

A round during which something else on the machine took more than --foreign of the CPUs' time does
not count and is run again (where there is a /proc/stat to tell; elsewhere every round counts).
"""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time


def busy():
    """Seconds that all CPUs together have worked or were taken away by the host; ours among them."""
    try:
        fields = open("/proc/stat").readline().split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, fields)
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(command, environment):
    """What the command printed, and the share of all CPUs' time that went elsewhere meanwhile."""
    before, start = busy(), time.monotonic() - 0.01
    mine = children()
    figures = last_json(command, environment)
    mine, after = children() - mine, busy()
    if before is None or after is None:
        return figures, 0.0
    whole = (time.monotonic() - start) * (os.cpu_count() or 1)
    return figures, max(0.0, after - before - mine) / whole


def last_json(command, environment):
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"beside_torch: {command[0]} failed ({done.returncode}): {done.stderr[-2000:]}")
    return json.loads(lines[-1])


def arguments():
    from_env = os.environ.get
    target = pathlib.Path(from_env("CARGO_TARGET_DIR", "target"))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--python", default=from_env("QUINTET_PEER_PYTHON"), help="a Python that has the peer's packages")
    p.add_argument("--peer", default=from_env("QUINTET_PEER"), help="the peer's script")
    p.add_argument("--ours", default=str(target / "release" / "bench-s"), help="our program, built before")
    p.add_argument("--config", default="S", choices=["S", "M"])
    p.add_argument("--layouts", nargs="*", default=["2,2,2,1"], metavar="DP,TP,PP,CP", help="ours beside our one rank")
    p.add_argument("--zero-stage", type=int, default=0, help="of those layouts")
    p.add_argument("--threads", type=int, default=2, help="of the peer and of our one rank")
    p.add_argument("--steps", type=int, default=6, help="that count, after two that do not")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--tries", type=int, default=30, help="rounds in all, those that do not count among them")
    p.add_argument("--foreign", type=float, default=0.05, help="share of the CPUs that others may take in a round")
    p.add_argument("--micro-batch", type=int, default=1, help="ours")
    p.add_argument("--peer-args", default="", help="more for the peer, as in '--compile'")
    a = p.parse_args()
    if not a.python or not a.peer:
        p.error("--python and --peer (or QUINTET_PEER_PYTHON and QUINTET_PEER) say what to run beside")
    return a


def ways(a):
    """Name and command of each way; the peer is the first."""
    common = ["--config", a.config, "--steps", str(a.steps)]
    ours = [a.ours, *common, "--micro-batch", str(a.micro_batch)]
    yield "peer", [a.python, a.peer, *common, "--threads", str(a.threads), *a.peer_args.split()]
    yield "1 rank", [*ours, "--ranks", "1", "--threads", str(a.threads)]
    for layout in a.layouts:
        yield layout, [*ours, "--layout", layout, "--zero-stage", str(a.zero_stage), "--threads", "1"]


def main():
    a = arguments()
    # Set on some machines against a fault of OpenBLAS; it slows the peer's own library.
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    commands = list(ways(a))
    seen = {name: [] for name, _ in commands}
    for number in range(a.tries):
        # Every second round backwards, so that nobody always runs on a machine warmed by another.
        order = commands if number % 2 == 0 else commands[::-1]
        this = {name: measured(command, environment) for name, command in order}
        worst = max(foreign for _, foreign in this.values())
        note = "" if worst <= a.foreign else "  (does not count)"
        print(f"round {number + 1}, others took {worst:.0%}{note}", file=sys.stderr)
        for name, (figures, _) in this.items():
            print(f"  {name:8} {json.dumps(figures)}", file=sys.stderr)
            if worst <= a.foreign:
                seen[name].append(figures)
        if len(seen["peer"]) == a.rounds:
            break
    else:
        done = len(seen["peer"])
        sys.exit(f"beside_torch: {done} of {a.rounds} rounds undisturbed in {a.tries} tries; run it on a quiet machine")
    names = [name for name, _ in commands]
    print(f"config {a.config}, f32, {a.rounds} rounds of {a.steps} steps, {a.threads} threads; tokens/s, medians over rounds")
    print(f"{'way':10} {'best step':>10} {'median step':>12} {'/ peer':>8} {'/ 1 rank':>9}   (of median steps, round by round)")
    of = lambda name, key="tok_s_median": [figures[key] for figures in seen[name]]
    ratio = lambda x, y: statistics.median(a / b for a, b in zip(of(x), of(y)))
    for name in names:
        best, middle = statistics.median(of(name, "tok_s_best")), statistics.median(of(name))
        label = seen[name][0]["peer"] if name == "peer" else name
        print(f"{label:10} {best:10.0f} {middle:12.0f} {ratio(name, 'peer'):7.2f}x {ratio(name, '1 rank'):8.2f}x")


main()
