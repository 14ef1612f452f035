"""Removes each barrier, wait, commit and bounds predicate of the shipped kernels, one at a time, and runs their tests.

    python3 .ci/mutate_kernels.py              all of them: long
    python3 .ci/mutate_kernels.py --sample 5   every so many-th, five in all
    python3 .ci/mutate_kernels.py --list       what would be removed

A mutant must be reported by the emulator or change a number. Survivors are printed; those in EXPECTED have a
reason, any other makes the run fail. Works on a copy of the tree, so the checkout is left alone.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ORDER = re.compile(r"(__syncthreads|__syncwarp|cp_async_wait<\d+>|cp_async_commit|bar_sync|bar_arrive)\([^;]*\);")
BOUND = re.compile(r"(?<=[(\s])([\w.]+) (<|>=) ([\w. *]+?)(?= \|\||\)| &&| \?)")
# The tests of a file: a filter of `cargo test --test emulated`.
TESTS = {
    "add": ["sums"], "attention_mma": ["flash::every_width", "flash::nothing", "flash::unseen"],
    "attention_simt": ["flash::near_naive", "flash::nothing", "flash::unseen"], "gemm_mma": ["products", "groups", "golden"],
    "permute": ["rows"], "router": ["router"], "cast": ["casts"], "cross_entropy": ["cross_entropy"], "dropout": ["dropout"], "embedding": ["embedding"],
    "gelu": ["laws::f32::gelu", "laws::bf16::gelu"], "gemm_simt": ["products"], "layer_norm": ["layer_norm"],
    "optimizer": ["adamw", "sgd", "squares"], "prelude": ["rms_norm", "squares"], "rms_norm": ["rms_norm"],
    "rope": ["rope"], "swiglu": ["swiglu"],
}
# (file, text of the line, what is removed): why nothing can see it.
EXPECTED = {}


def mutants():
    """(path, start, end, replacement, file, line's text, what) for each removal."""
    for path in sorted((ROOT / "kernels/cuda").iterdir()):
        if path.suffix != ".cu" and path.name != "prelude.cuh":
            continue
        at = 0
        for line in path.read_text().splitlines(keepends=True):
            code = line.split("//")[0]
            found = [(m, ";") for m in ORDER.finditer(code)]
            if re.search(r"\bif \(|\bbool \w+ =|\?", code) and "constexpr" not in code:
                leaves = re.search(r"\b(return|continue);", code)
                found += [(m, "false" if leaves else "true") for m in BOUND.finditer(code)]
            for match, instead in found:
                yield path, at + match.start(), at + match.end(), instead, path.stem, line.strip(), match.group()
            at += len(line)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    todo = list(mutants())
    if options.list:
        for _, _, _, instead, file, line, what in todo:
            print(f"{file}: {what} -> {instead}   in   {line}")
        return
    if options.sample:
        todo = todo[:: max(1, len(todo) // options.sample)][: options.sample]
    tree = pathlib.Path(tempfile.mkdtemp(prefix="quintet-mutants-"))
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "mutants"
    environment = dict(os.environ, CARGO_TARGET_DIR=str(target), RUST_BACKTRACE="0")
    command = ["cargo", "test", "-q", "-p", "quintet-kernels", "--features", "emulated", "--test", "emulated"]
    try:
        listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        for name in listed:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        if subprocess.run(command + ["--no-run"], cwd=tree, env=environment).returncode:
            sys.exit("mutants: the tests do not build")
        survivors = []
        for path, start, end, instead, file, line, what in todo:
            mutant = tree / path.relative_to(ROOT)
            text = path.read_text()
            mutant.write_text(text[:start] + instead + text[end:])
            built = subprocess.run(command + ["--no-run"], cwd=tree, env=environment, capture_output=True, text=True)
            if built.returncode:
                sys.exit(f"mutants: {file}: {line} without {what} does not compile\n{built.stderr[-2000:]}")
            run = subprocess.run(command + ["--"] + TESTS[file], cwd=tree, env=environment, capture_output=True)
            mutant.write_text(text)
            reason = EXPECTED.get((file, line, what))
            verdict = "caught" if run.returncode else f"survives: {reason}" if reason else "SURVIVES"
            print(f"{file}: {what} in `{line}`: {verdict}", flush=True)
            if verdict == "SURVIVES":
                survivors.append(what)
        print(f"mutants: {len(todo)} tried, {len(survivors)} survived without a reason")
        sys.exit(1 if survivors else 0)
    finally:
        shutil.rmtree(tree, ignore_errors=True)


main()
