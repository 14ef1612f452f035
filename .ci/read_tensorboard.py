#!/usr/bin/env python3
"""Reads quintet's event files with TensorBoard's own reader and compares every scalar with metrics.jsonl.

    python3 -m venv V && V/bin/pip install tensorboard
    V/bin/python .ci/read_tensorboard.py target/debug/quintet

Runs four steps, begins anew and runs six, then goes on from the checkpoint of four: what earlier files say of the
steps that a later one does again must be void.
"""
import json
import math
import pathlib
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def expected(line, world):
    """Tag and value of what a metrics line says."""
    yield "loss_metrics/global_avg_loss", line["loss"]
    yield "grad_norm", line["grad_norm"]
    yield "lr", line["lr"]
    yield "throughput(tps)", line["tokens_per_s"] / world
    yield "time_metrics/end_to_end(s)", line["step_ms"] / 1e3
    yield "memory/max_active(GiB)", sum(line["memory_bytes"].values()) / 2**30
    yield "pipeline/bubble(%)", 100 * line["bubble"]
    for group, count in line["bytes"].items():
        yield f"comm/{group}/GB", count / 1e9
    for group, ms in line["comm_wait_ms"].items():
        yield f"comm/{group}/wait(%)", 100 * ms / line["step_ms"]
    if "held_out" in line:
        yield "validation_metrics/loss", line["held_out"]
    if "experts" in line:
        yield "moe/load_imbalance", line["experts"]["imbalance"]
        yield "moe/dropped(%)", 100 * line["experts"]["dropped"]


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        at = pathlib.Path(folder)
        # A short text, so that its held-out part is short too.
        (at / "text").write_text("".join(chr(32 + i * i % 95) for i in range(3000)))
        run = "train --model tiny-moe --dp 2 --tp 2 --ep 2 --gbs 4 --mbs 1 --eval-interval 2 --quiet --seq-length 16 --data text --run-dir run --tensorboard-dir tb".split()
        subprocess.run([program, *run, "--steps", "4", "--save", "save"], check=True, cwd=at)
        subprocess.run([program, *run, "--steps", "6"], check=True, cwd=at)
        subprocess.run([program, *run, "--steps", "6", "--load", "save"], check=True, cwd=at)
        # Three files: steps 1 to 4; 1 to 6 of a run begun anew; 5 and 6 after the checkpoint.
        lines = [json.loads(text) for text in (at / "run/metrics.jsonl").read_text().splitlines()]
        files = sorted((at / "tb").iterdir(), key=lambda file: file.stat().st_mtime)
        assert len(files) == 3, files
        reader = EventAccumulator(str(files[2]))
        reader.Reload()
        compared = 0
        for line in lines[4:]:
            for tag, value in expected(line, 4):
                found = {event.step: event.value for event in reader.Scalars(tag)}
                assert math.isclose(found[line["step"]], value, rel_tol=1e-6, abs_tol=1e-12), (tag, line["step"], found, value)
                compared += 1
        # The folder as TensorBoard shows it: one run, each step once.
        whole = EventAccumulator(str(at / "tb"))
        whole.Reload()
        steps = [event.step for event in whole.Scalars("loss_metrics/global_avg_loss")]
        assert steps == [1, 2, 3, 4, 5, 6], steps
        print(f"{compared} scalars under {len(reader.Tags()['scalars'])} tags read back as written; steps {steps}")


main()
