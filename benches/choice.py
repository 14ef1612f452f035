#!/usr/bin/env python3
"""The plan that the model chooses beside every plan that can be forced, per operation and length, in one sitting.

    cargo build --release -p quintet-ref-trainer
    benches/choice.py [--rounds 15]

First `quintet bench --calibrate` measures the constants that the model chooses by, and the model says what it chooses.
Then every plan that the order admits is forced in turns, round by round, the chosen one too; what counts is the median
of the rounds' ratios. Sockets, since what ranks share memory for goes by no plan, whatever is demanded; under order
any, which admits more plans than order rank.

Two processes fall into their places anew with each start, so short rounds and many of them tell more than long ones.
Plans that perform the same messages differ by nothing but noise (of two ranks, all of reduce_scatter, of all_gather
and of all_to_all do). So beside the winners by name it says which are left where the choice wins all cells in which it
is within --tie of the best.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

OFFERS = {
    "all_reduce": "direct pairwise ring tree recursive_doubling halving_doubling bruck double_tree",
    "reduce_scatter": "pairwise ring halving_doubling",
    "all_gather": "pairwise ring recursive_doubling bruck",
    "broadcast": "direct ring tree double_tree",
    "all_to_all": "pairwise bruck",
}
# The aims: the choice at most so many times as slow as the best, in such a share of the cells; so many winners.
SLOWER, SHARE, WINNERS = 1.2, 0.9, 3


def arguments():
    root = pathlib.Path(__file__).resolve().parent.parent
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quintet", default=str(target / "release" / "quintet"))
    p.add_argument("--transports", nargs="*", choices=["tcp", "unix"], default=["tcp", "unix"])
    p.add_argument("--ops", nargs="*", choices=list(OFFERS), default=list(OFFERS))
    p.add_argument("--ranks", type=int, default=2, help="at most as many as cores")
    p.add_argument("--order", choices=["any", "rank"], default="any")
    p.add_argument("--sizes", nargs=3, default=["64", "4M", "16"], metavar=("LEAST", "MOST", "FACTOR"))
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--iters", type=int, default=50, help="timed calls of each length in a round")
    p.add_argument("--tie", type=float, default=0.05)
    p.add_argument("--constants", help="a file of constants, instead of measuring them")
    return p.parse_args()


def bench(a, transport, words):
    """The output of quintet bench; None where the model admits no such plan."""
    command = [a.quintet, "bench", *words, "--ranks", str(a.ranks), "--transport", transport]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "nothing is left" in done.stderr:
        return None
    if done.returncode:
        sys.exit(f"choice: {' '.join(command)} failed ({done.returncode}): {done.stderr[-2000:]}")
    return done.stdout


def measure(a, transport, op, plan, constants, iters):
    """The plan performed and microseconds, by length."""
    least, most, factor = a.sizes
    words = [op, "-b", least, "-e", most, "-f", factor, "-n", str(iters), "--json", "--constants", constants]
    words += ["--reduction-order", a.order, "--check", "false", *(["--override", f"{op}:{plan}"] if plan else [])]
    out = bench(a, transport, words)
    rows = [json.loads(line) for line in (out or "").splitlines() if line.startswith("{")]
    return {row["bytes"]: (row["algorithm"], row["us"]) for row in rows if not row["in_place"]}


def cells(a, transport, op, constants):
    """A row for each length."""
    choice = measure(a, transport, op, None, constants, 1)
    plans, rounds = OFFERS[op].split(), []
    for number in range(a.rounds):
        # Every second round backwards, so that nobody always runs on a machine warmed by another.
        order = plans if number % 2 == 0 else plans[::-1]
        rounds.append({plan: found for plan in order if (found := measure(a, transport, op, plan, constants, a.iters))})
        plans = [plan for plan in plans if plan in rounds[0]]
    for size, (chosen, _) in sorted(choice.items()):
        us = lambda plan: statistics.median(r[plan][size][1] for r in rounds)
        forced = sorted((us(plan), plan) for plan in plans)
        best = forced[0][1]
        ratio = statistics.median(r[chosen][size][1] / r[best][size][1] for r in rounds)
        clear = chosen if ratio <= 1 + a.tie else best
        others = ", ".join(f"{plan} {t:.1f}" for t, plan in forced)
        print(f"| {op} | {size} | {chosen} | {best} | {ratio:.2f}x | {others} |", flush=True)
        yield ratio, best, clear, f"{transport}, {op}, {size} bytes: {chosen} {ratio:.2f}x {best}"


def main():
    a = arguments()
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        constants = a.constants or os.path.join(folder, "constants")
        for transport in a.transports:
            if not a.constants:
                text = bench(a, transport, ["--calibrate", "--constants", constants])
                print("".join(f"    {line}\n" for line in text.splitlines()), end="")
            print(f"\n{transport}, {a.ranks} ranks on {os.cpu_count()} cores, order {a.order}, medians of {a.rounds} rounds\n")
            print("| op | bytes | chosen | best | chosen / best | forced, us |\n|---|---|---|---|---|---|")
            found = [cell for op in a.ops for cell in cells(a, transport, op, constants)]
            near = sum(ratio <= SLOWER for ratio, *_ in found)
            best, clear = ({cell[at] for cell in found} for at in (1, 2))
            met = near >= SHARE * len(found) and len(best) >= WINNERS
            fine &= met
            said = "met" if met else "MISSED"
            print(f"\n{transport}: {said}: within {SLOWER}x of the best forced plan in {near} of {len(found)} cells;")
            print(f"{len(best)} winners ({', '.join(sorted(best))}), beyond ties {len(clear)} ({', '.join(sorted(clear))})")
            print("".join(f"  {text}\n" for ratio, *_, text in found if ratio > SLOWER), end="")
    sys.exit(0 if fine else 1)


main()
